"""Mean and spread without overflow, underflow or cancellation, in float32 passes with float64 totals.

    unit     the power of two that lifts the largest number to about 2^45; v = x * unit is exact
    mean     sum v / n, then the mean of what is left: sum (v - mean) / n
    M2       sum (v - mean)^2

float32 holds the square of any v down to 2^-108 of the largest, be the tensor 1e-12 or 1e30.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

Number = Tensor | float

TARGET = 45  # 2^45 squared and summed over 2^36 elements is still a float32
BIAS = 127


def unit_of(largest: Tensor) -> Tensor:
    """The unit of a tensor whose largest number is `largest`, both [] float32."""
    exponent = largest.float().view(torch.int32) >> 23  # biased; 255 for an infinity, which the clamp tames
    field = (2 * BIAS + TARGET - exponent).clamp(1, 2 * BIAS - 1)
    return (field << 23).to(torch.int32).view(torch.float32)


def total(rows: Tensor) -> Tensor:
    """The sum of row sums, in float64."""
    return rows.sum(dtype=torch.float64)


def center(v_MK: Tensor, finite: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and sum of (v - mean)^2, [] float64 each, in v's units.

    Args:
        v_MK: float32, zero where it is not finite.
        finite: bool [M, K], which elements count; None for all.
    """
    n: Number = float(v_MK.numel()) if finite is None else finite.sum().double().clamp(min=1)
    rounded = (total(v_MK.sum(1)) / n).float()
    centered = v_MK - rounded
    if finite is not None:
        centered.masked_fill_(~finite, 0.0)
    # The mean was rounded to float32: sum (c - left)^2 = sum c^2 - n left^2.
    left = total(centered.sum(1)) / n
    m2 = total(centered.square_().sum(1)) - n * left**2
    return rounded.double() + left, m2.clamp(min=0)
