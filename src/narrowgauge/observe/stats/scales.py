"""Scales as the watch sees them: their own moments, and how they spread over a matrix without copies.

    times(c, scale)_ij = c_ij * scale_g(i,j)

Legend: M = rows, K = columns, g(i, j) = the granule that holds element (i, j).
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.compute.quant import Block, Granularity


def times(c_MK: Tensor, scale: Tensor, granularity: Granularity) -> Tensor:
    """Multiply every element by its granule's scale, in place; c_MK is contiguous and is returned."""
    M, K = c_MK.shape
    if not isinstance(granularity, Block):
        return c_MK.mul_(scale)
    if M % granularity.rows or K % granularity.cols:
        return c_MK.mul_(granularity.expand(scale, (M, K)))
    R, C = scale.shape
    c_MK.view(R, granularity.rows, C, granularity.cols).mul_(scale.view(R, 1, C, 1))
    return c_MK


def scale_values(scale: Tensor) -> dict[str, Tensor | float]:
    """The slots of the packed moments that speak of scales; only finite scales count."""
    wide = scale.detach().double().reshape(-1)
    finite = wide.isfinite()
    n = finite.sum().double()
    filled = torch.where(finite, wide, 0.0)
    mean = filled.sum() / n.clamp(min=1)
    spread = torch.where(finite, filled - mean, 0.0).square().sum()
    return {
        "scale_n": n,
        "scale_mean": mean,
        "scale_m2": spread,
        "scale_min": torch.where(finite, wide, torch.inf).amin(),
        "scale_max": torch.where(finite, wide, -torch.inf).amax(),
    }
