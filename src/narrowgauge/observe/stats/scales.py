"""Scales as the watch sees them: their own moments, and how they spread over a matrix without copies.

    times(c, scale)_ij = c_ij * scale_g(i,j)

Legend: M = rows, K = columns, g(i, j) = the granule that holds element (i, j).
"""

from __future__ import annotations

import numpy as np
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
    c_MK.view(R, granularity.rows, C, granularity.cols).mul_(scale.reshape(R, 1, C, 1))
    return c_MK


def scale_values(scale: Tensor) -> dict[str, Tensor | float]:
    """The slots of the packed moments that speak of scales; only finite scales count. Floats on the CPU."""
    scale = scale.detach()
    if scale.device.type == "cpu":
        return _on_cpu(scale)
    wide = scale.double().reshape(-1)
    finite = wide.isfinite()
    n = finite.sum().double()
    filled = torch.where(finite, wide, 0.0)
    mean = filled.sum() / n.clamp(min=1)
    return {
        "scale_n": n,
        "scale_mean": mean,
        "scale_m2": torch.where(finite, filled - mean, 0.0).square().sum(),
        "scale_min": torch.where(finite, wide, torch.inf).amin(),
        "scale_max": torch.where(finite, wide, -torch.inf).amax(),
    }


def _on_cpu(scale: Tensor) -> dict[str, Tensor | float]:
    """The same through numpy, which is the quicker one for a few numbers."""
    if scale.numel() == 1 and np.isfinite(value := float(scale)):
        return {"scale_n": 1.0, "scale_mean": value, "scale_m2": 0.0, "scale_min": value, "scale_max": value}
    wide = scale.to(torch.float64, copy=True).numpy().reshape(-1)  # what numpy has seen cannot be resized any more
    wide = wide[np.isfinite(wide)]
    if not wide.size:
        return {"scale_n": 0.0, "scale_max": -np.inf}
    mean = wide.mean()
    return {
        "scale_n": float(wide.size),
        "scale_mean": float(mean),
        "scale_m2": float(((wide - mean) ** 2).sum()),
        "scale_min": float(wide.min()),
        "scale_max": float(wide.max()),
    }
