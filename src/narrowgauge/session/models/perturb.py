"""The noise twin's breath of noise.

w' = w (1 + relative N(0,1)), rounded to the type of w
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy


@torch.no_grad()
def perturb(module: nn.Module, relative: float, seed: int) -> None:
    """Multiply every trained weight by 1 + relative * N(0,1), from a generator of its own."""
    for number, p in enumerate(module.parameters()):
        if is_lazy(p) or not p.requires_grad or not p.is_floating_point() or p.numel() == 0:
            continue
        generator = torch.Generator("cpu").manual_seed(seed + number)
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu").to(p.device)
        if p.dtype in (torch.float32, torch.float64):
            p.mul_(1 + relative * noise.to(p.dtype))
        else:  # where 1 + noise itself would be rounded
            p.copy_(p.float() * (1 + relative * noise))
