"""The merge law on the device: the twin of `metrics.merge`, in float64, with no host in the loop.

sum, min, max, and for central moments  M2 = sum M2_i + n_i delta_i^2, ...      (see metrics.merge)

A part of zeros alone brings no scale, and one that holds Inf or NaN no ratio of amaxes.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from narrowgauge.metrics import MOMENTS, Layout


def merge(parts: Tensor, layout: Layout = MOMENTS) -> Tensor:
    """One packed vector that says what all the parts say together.

    Args:
        parts: [P, ..., width or head_width] float64; neutral vectors (`empty`) stand for parts without data.
        layout: what the slots are.

    Returns:
        [..., width] float64 on the same device.
    """
    zeros, neutral = parts[..., layout["amax"], None] == 0, _neutral(parts.device, parts.shape[-1])
    parts = parts.clone()
    parts[..., layout.scales] = torch.where(zeros, neutral[layout.scales], parts[..., layout.scales])
    ratio = parts[..., layout["amax_ratio"]]
    spoiled = parts[..., layout["nan_count"]] + parts[..., layout["inf_count"]] > 0
    ratio.masked_fill_(spoiled & ~(ratio < torch.inf), -torch.inf)
    out = parts.sum(0)
    for law, reduce in (("min", torch.amin), ("max", torch.amax)):
        for column in layout.columns(law):
            out[..., column] = reduce(parts[..., column], 0)
    for names in layout.groups:
        n, mean, m2, *higher = (parts[..., layout[name]] for name in names)
        total = n.sum(0)
        center = (n * mean).sum(0) / total.clamp(min=1)
        delta = torch.where(n > 0, mean - center, 0.0)
        merged = [total, center, (m2 + n * delta**2).sum(0)]
        if higher:
            m3, m4 = higher
            merged.append((m3 + 3 * delta * m2 + n * delta**3).sum(0))
            merged.append((m4 + 4 * delta * m3 + 6 * delta**2 * m2 + n * delta**4).sum(0))
        for name, value in zip(names, merged, strict=True):
            out[..., layout[name]] = value
    return out


@cache
def _neutral(device: torch.device, width: int) -> Tensor:
    return torch.from_numpy(MOMENTS.empty()[:width]).to(device)


def empty(device: torch.device, *shape: int, width: int = MOMENTS.width) -> Tensor:
    """Neutral vectors on a device, [*shape, width] float64."""
    return _neutral(device, width).expand(*shape, width).clone()
