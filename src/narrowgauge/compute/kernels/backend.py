"""What a backend promises: a product of two quantized operands, and an honest answer about its limits.

    y_PQ = (codes_a_PC · scale_a) (codes_b_QC · scale_b)ᵀ + bias_Q       accumulated in float32, rounded once

Legend: P, Q = rows of a and b; C = the contracted dimension, last in both.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from narrowgauge.compute.kernels.both import Both, Given
from narrowgauge.compute.quant import Granularity, QTensor
from narrowgauge.compute.recipes import Operand, Recipe
from narrowgauge.errors import ShapeError


class Backend(Protocol):
    """One way to run the three gemms; stateless, so that one instance serves every layer."""

    @property
    def name(self) -> str:
        """The name that reports print and `backend=` takes."""
        ...

    @property
    def watches(self) -> bool:
        """Whether `quantize_both` fills a `look` while it quantizes."""
        ...

    def supports(self, recipe: Recipe, device: torch.device) -> str | None:
        """Return None when `recipe` runs here, else the reason why not."""
        ...

    def refuses(self, recipe: Recipe, n: int, k: int) -> str | None:
        """Return None when a layer with weight [n, k] can run, else the reason why it must stay high."""
        ...

    def amax(self, x_MK: Tensor, granularity: Granularity) -> Tensor:
        """Return the largest magnitudes of x's granules, float32, of the granularity's scale shape."""
        ...

    def quantize_both(
        self,
        x_MK: Tensor,
        plain: Operand | None,
        turned: Operand | None,
        *,
        shared: bool,
        given: Given | None = None,
        amax: Tensor | None = None,
        look: Any | None = None,
    ) -> Both:
        """Quantize a tensor for up to two gemms; see `kernels.both`. Codes and scales are the reference's."""
        ...

    def gemm(
        self,
        a: QTensor,
        b: QTensor,
        out_dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast_accum: bool = False,
        fake: bool = False,
    ) -> Tensor:
        """Return a [P, C] times b [Q, C] transposed, plus bias [Q], as [P, Q] in `out_dtype`.

        `fake` dequantizes both operands to `out_dtype` and multiplies there. Raises ShapeError if C differs.
        """
        ...


def check_contraction(a: QTensor, b: QTensor) -> None:
    """Raise ShapeError unless both operands are matrices with the same last dimension."""
    if a.shape[-1] != b.shape[-1]:
        raise ShapeError(
            f"a is {list(a.shape)} and b is {list(b.shape)}; both must end in the contracted dimension. "
            "Transpose one of them (`.T`) before the product."
        )


def fake_gemm(a: QTensor, b: QTensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Return the product of the dequantized operands, computed in `dtype` as an unquantized layer would."""
    low = bias.to(dtype) if bias is not None else None
    return torch.nn.functional.linear(a.dequantize(dtype), b.dequantize(dtype), low)


def not_multiple(n: int, k: int, of: int, why: str) -> str | None:
    """Return the sentence that names the dimension that is not a multiple of `of`, None if both are."""
    for letter, value in (("N", n), ("K", k)):
        if value % of:
            return f"{letter}={value} is not a multiple of {of}{why}"
    return None


def plus(y_PQ: Tensor, bias: Tensor) -> Tensor:
    """A product of ours plus a bias [Q], in the product's memory where nobody else can have it."""
    return (y_PQ + bias).to(y_PQ.dtype) if kept_by_modes() else y_PQ.add_(bias)


def kept_by_modes() -> bool:
    """Whether a mode of the program may keep the results of single operations, as a selective checkpoint does.

    It refuses to give out one that was written to since.
    """
    return bool(torch._C._len_torch_dispatch_stack())
