"""Weights that are nothing but float32 numbers in the CPU's memory: what the compiled walk is told of them.

Nothing is detached and nothing asked twice: of many small weights this takes longer than reading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.session.tensors.sharded import PLAIN

Array = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Where some tensors are, but for empty ones.

    Args:
        ats, sizes: their addresses, and how many elements each has.
        shapes: theirs.
        elements: of all.
        numbers: the addresses once more.
    """

    ats: Array
    sizes: Array
    shapes: list[torch.Size]
    elements: int
    numbers: list[int]


def runs(tensors: Sequence[Tensor], known: Runs | None = None) -> Runs | None:
    """Where these are; None if there are none, or one of them is anything else, or its memory was freed.

    What was `known` of them is given back if it is still true.
    """
    ats: list[int] = []
    sizes: list[int] = []
    shapes: list[torch.Size] = []
    for x in tensors:
        if type(x) not in PLAIN or x.dtype is not torch.float32 or not x.is_cpu or x.layout is not torch.strided:
            return None
        size = x.numel()
        if not size:
            continue
        at = x.data_ptr()
        if not at or not x.is_contiguous() or x.is_neg():
            return None
        if x.untyped_storage().nbytes() < 4 * (x.storage_offset() + size):
            return None
        ats.append(at)
        sizes.append(size)
        shapes.append(x.shape)
    if known is not None and ats == known.numbers and shapes == known.shapes:
        return known
    return Runs(np.array(ats, np.int64), np.array(sizes, np.int64), shapes, sum(sizes), ats) if ats else None
