"""What is taken from a share of the rows: exponents, block ranges, central moments up to the fourth.

    exponents    counts per float32 exponent field of |x|
    ranges       counts per exponent field of amax_b / |x|, b the run of 128 columns that holds x
    moments      n, mean, sum (x - mean)^p for p = 2, 3, 4, in float64

A histogram's count costs ten times an elementwise pass, so large tensors give every `stride`-th row, and the caller turns
`offset` from step to step.

Legend: R = sampled rows, K = columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.metrics.bins import RANGE_BLOCK
from narrowgauge.observe.stats.counting import FIELDS, count_fields


@dataclass(frozen=True)
class Sample:
    """Counts of the sampled rows, on the device.

    Args:
        values: the sample's central moments by slot name.
        exponents, ranges: [256] float64 per exponent field.
        zeros: [] float64, sampled elements that are zero.
    """

    values: dict[str, Tensor | float]
    exponents: Tensor
    ranges: Tensor
    zeros: Tensor


def sample(x_MK: Tensor, bits_MK: Tensor, stride: int, offset: int, finite: Tensor | None = None) -> Sample:
    """Take rows offset, offset + stride, ... of x.

    Args:
        x_MK: float32, non-finite elements replaced by zero.
        bits_MK: int32, the bits of |x|.
        finite: which elements were finite; None for all of them.
    """
    rows = slice(offset, None, stride)
    x_RK, bits_RK = x_MK[rows].double(), bits_MK[rows].contiguous()
    zeros = (bits_RK == 0).sum().double()
    left_out = None if finite is None else ~finite[rows]
    exponents = count_fields(bits_RK)
    if left_out is None:
        n: Tensor | float = float(x_RK.numel())
        mean = x_RK.mean()
        centered = x_RK.sub_(mean)
    else:
        n = (~left_out).sum().double()
        gone = left_out.sum().double()
        zeros = zeros - gone
        exponents[0] -= gone
        mean = x_RK.sum() / n.clamp(min=1)
        centered = x_RK.sub_(mean).masked_fill_(left_out, 0.0)
    square = centered * centered
    flat, flat_square = centered.view(-1), square.view(-1)
    values: dict[str, Tensor | float] = {
        "sample_n": n,
        "sample_mean": mean,
        "sample_m2": flat_square.sum(),
        "sample_m3": torch.dot(flat, flat_square),
        "sample_m4": torch.dot(flat_square, flat_square),
    }
    return Sample(values, exponents, _ranges(bits_RK), zeros)


def _ranges(bits_RK: Tensor) -> Tensor:
    """Counts per exponent field of block amax / |x|; a zero's ratio is infinite or NaN: field 255, folded away."""
    magnitude = bits_RK.view(torch.float32)
    R, K = magnitude.shape
    whole = K - K % RANGE_BLOCK
    total = torch.zeros(FIELDS, dtype=torch.float64, device=bits_RK.device)
    for part, width in ((magnitude[:, :whole], RANGE_BLOCK), (magnitude[:, whole:], K - whole)):
        if part.numel():
            blocks = part.reshape(R, -1, width)
            ratio = blocks.amax(-1, keepdim=True) / blocks
            total += count_fields(ratio.view(torch.int32) & 0x7FFFFFFF)
    return total
