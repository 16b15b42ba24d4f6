"""The reference gemm: exact up to float32 accumulation, on any device, for every granularity.

    tensor, row:   y = (codes_a · codes_bᵀ) · scale_a · scale_bᵀ + bias       scales applied after the product
    block:         y = (codes_a · scale_a) (codes_b · scale_b)ᵀ + bias        exact: scales are powers of two

Every E4M3 and E5M2 code is exact in BF16 and in float32, and so is the product of two codes in float32, so
only the order of the additions is open. CPUs multiply in float32 (BF16 is several times slower there), GPUs
in BF16 with a float32 result. torch's function is taken out of torch here, so that whoever listens for what a program
multiplies, by putting one of his own in its place, does not hear this.
"""

from __future__ import annotations

import torch
from torch import Tensor, mm

from narrowgauge.compute.kernels.backend import check_contraction, fake_gemm, kept_by_modes, not_multiple, plus
from narrowgauge.compute.kernels.both import quantize_both
from narrowgauge.compute.quant import Granularity, PerRow, PerTensor, QTensor, decode
from narrowgauge.compute.recipes import Recipe

_FACTORED = (PerTensor, PerRow)


class Reference:
    """Multiplies decoded codes; what every faster backend is compared with."""

    name = "reference"
    watches = False

    def supports(self, recipe: Recipe, device: torch.device) -> str | None:
        """Return None: every recipe runs on every device, emulated."""
        return None

    def refuses(self, recipe: Recipe, n: int, k: int) -> str | None:
        """Refuse what FP8 hardware refuses, so that emulation converts the same layers."""
        return not_multiple(n, k, 16, ", which FP8 gemms need")

    def amax(self, x_MK: Tensor, granularity: Granularity) -> Tensor:
        """Return the largest magnitudes of x's granules."""
        return granularity.amax(x_MK)

    quantize_both = staticmethod(quantize_both)

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
        """Return a [P, C] times b [Q, C] transposed, plus bias [Q], as [P, Q]."""
        check_contraction(a, b)
        if fake:
            return fake_gemm(a, b, out_dtype, bias)
        if isinstance(a.granularity, _FACTORED) and isinstance(b.granularity, _FACTORED):
            y_PQ = _product(a.codes, b.codes)
            # One scale after the other: the product of two tiny scales would be a subnormal.
            scale_b = b.scale.T if b.scale.ndim else b.scale
            y_PQ = y_PQ * a.scale * scale_b if kept_by_modes() else y_PQ.mul_(a.scale).mul_(scale_b)
        else:
            y_PQ = mm(a.dequantize(torch.float32), b.dequantize(torch.float32).T)
        if bias is not None:
            y_PQ = plus(y_PQ, bias)
        return y_PQ.to(out_dtype)


def _product(a_PC: Tensor, b_QC: Tensor) -> Tensor:
    if a_PC.device.type == "cuda" and a_PC.shape[0] and a_PC.shape[1]:
        return mm(decode(a_PC, torch.bfloat16), decode(b_QC, torch.bfloat16).T, out_dtype=torch.float32)
    return mm(decode(a_PC, torch.float32), decode(b_QC, torch.float32).T)
