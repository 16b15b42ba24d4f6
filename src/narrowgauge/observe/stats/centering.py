"""Mean and spread without overflow, underflow or cancellation, in float32 passes with float64 totals.

    unit     the power of two that lifts the largest number to about 2^45; v = x * unit is exact
    mean     sum v / n
    M2       sum v^2 - n mean^2 where that keeps its digits, else sum (v - mean)^2

float32 holds the square of any v down to 2^-108 of the largest, be the tensor 1e-12 or 1e30.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

Number = Tensor | float

TARGET = 45  # 2^45 squared and summed over 2^36 elements is still a float32
FITS = (2.0**-10, 2.0**TARGET)  # largest numbers that need no lifting
BIAS = 127


def unit_of(largest: Tensor) -> Tensor | None:
    """The unit of a tensor whose largest number is `largest` ([] float); None stands for 1, found out only on the CPU."""
    if largest.device.type == "cpu" and FITS[0] <= float(largest) <= FITS[1]:
        return None
    exponent = largest.float().view(torch.int32) >> 23  # biased; 255 for an infinity, which the clamp tames
    field = (2 * BIAS + TARGET - exponent).clamp(1, 2 * BIAS - 1)
    return (field << 23).to(torch.int32).view(torch.float32)


def total(rows: Tensor) -> Tensor:
    """The sum of row sums, in float64."""
    return rows.sum(dtype=torch.float64)


def center(v_MK: Tensor, energy_M: Tensor, finite: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and sum of (v - mean)^2, [] float64 each, in v's units.

    Args:
        v_MK: float32, zero where it is not finite.
        energy_M: sum of v^2 along rows.
        finite: bool [M, K], which elements count; None for all.
    """
    n: Number = float(v_MK.numel()) if finite is None else finite.sum().double().clamp(min=1)
    mean = total(v_MK.sum(1)) / n
    all_energy = total(energy_M)
    m2 = all_energy - n * mean**2
    # The difference of two like numbers keeps few digits: centre first, unless they are known not to be alike.
    if not (v_MK.device.type == "cpu" and float(m2) > 0.1 * float(all_energy)):
        centered = v_MK - mean.float()
        if finite is not None:
            centered.masked_fill_(~finite, 0.0)
        left = (
            total(centered.sum(1)) / n
        )  # the mean was rounded to float32: sum (c - left)^2 = sum c^2 - n left^2
        m2 = (total(centered.square_().sum(1)) - n * left**2).clamp(min=0)
        mean = mean.float().double() + left
    return mean, m2
