"""Which tensors of products can be counted as they are, and how they lie as matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.compute.nn.conversion.eligible import DTYPES
from narrowgauge.session.tensors.sharded import PLAIN


def usual(x: Tensor | None, w: Tensor | None, y: Tensor | None) -> bool:
    """Whether each of them, if it is there, is a plain tensor on the CPU or a GPU."""
    return (
        (x is None or (type(x) in PLAIN and (x.is_cpu or x.is_cuda)))
        and (w is None or (type(w) in PLAIN and (w.is_cpu or w.is_cuda)))
        and (y is None or type(y) is Tensor)
    )


def same_rows(made: Tensor, y: Tensor) -> bool:
    """Whether both have the same rows, one of them as a matrix."""
    return made.dim() == 2 and y.dim() > 0 and made.shape[-1] == y.shape[-1]


def is_matrix(x: Tensor) -> bool:
    """Whether it is plain numbers on the CPU or a GPU, some, of a type that quantizers take."""
    plain = type(x) in PLAIN and x.dtype in DTYPES and x.layout is torch.strided and not x.is_nested
    return plain and (x.is_cpu or x.is_cuda) and x.numel() > 0


def pieces(x: Tensor) -> Tensor | None:
    """All pieces of a nested tensor as one matrix [M, K]; None if they do not lie side by side, or differ in K."""
    try:
        return x.detach().values().reshape(-1, x.size(-1)) if x.is_contiguous() else None
    except RuntimeError:
        return None


def kind(x: Tensor | None) -> str:
    """What it is called in a note, by which it is told that it is not recorded."""
    if x is None:
        return "sum that is not yet summed over the ranks"
    if x.is_nested:
        return f"nested Tensor of {x.dtype}".replace("torch.", "")
    kind = f"{type(x).__name__} of {x.dtype}"
    return (kind if x.layout is torch.strided else f"{kind}, {x.layout}").replace("torch.", "")
