"""What is taken from a share of the rows: exponents, block ranges, central moments up to the fourth.

    exponents    counts per float32 exponent field of |x|
    ranges       counts per exponent field of amax_b / |x|, b the run of 128 columns that holds x
    moments      n, mean, sum (x - mean)^p for p = 2, 3, 4, in float64

A count costs ten times an elementwise pass, so of a large tensor the caller gives a share of the rows, another one
every step.

Legend: R = sampled rows, K = columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.metrics.bins import RANGE_BLOCK
from narrowgauge.observe.stats.counting import FIELDS, count_fields

MAGNITUDE = 0x7FFFFFFF


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


def sample(x_RK: Tensor, bits_RK: Tensor, finite: Tensor) -> Sample:
    """Look at some rows of x.

    Args:
        x_RK: float32, non-finite elements replaced by zero.
        bits_RK: int32, the bits of |x|.
        finite: bool, which elements were finite.
    """
    x = x_RK.double()
    bits = bits_RK.contiguous()
    n = finite.sum().double()
    gone = (~finite).sum().double()
    exponents = count_fields(bits)
    exponents[0] -= gone  # they were replaced by zeros
    mean = x.sum() / n.clamp(min=1)
    centered = torch.where(finite, x - mean, 0.0)
    square = centered * centered
    flat, flat_square = centered.view(-1), square.view(-1)
    values: dict[str, Tensor | float] = {
        "sample_n": n,
        "sample_mean": mean,
        "sample_m2": flat_square.sum(),
        "sample_m3": torch.dot(flat, flat_square),
        "sample_m4": torch.dot(flat_square, flat_square),
    }
    return Sample(values, exponents, _ranges(bits), (bits == 0).sum().double() - gone)


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
            total += count_fields(ratio.view(torch.int32) & MAGNITUDE)
    return total
