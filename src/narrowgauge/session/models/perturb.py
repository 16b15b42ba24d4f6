"""The noise twin's breath of noise.

w' = w (1 + relative N(0,1))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


@torch.no_grad()
def perturb(module: nn.Module, relative: float, seed: int) -> None:
    """Multiply every trained weight by 1 + relative * N(0,1), from a generator of its own.

    A 16-bit weight cannot hold so small a change: there, every ten-thousandth element (at least one) moves by one
    unit in the last place instead.
    """
    for number, p in enumerate(module.parameters()):
        if is_lazy(p) or not p.requires_grad or not p.is_floating_point() or p.numel() == 0:
            continue
        generator = torch.Generator("cpu").manual_seed(seed + number)
        if p.dtype in (torch.float32, torch.float64):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu")
            p.mul_(1 + relative * noise.to(p.device, p.dtype))
            continue
        chosen = torch.randint(p.numel(), (max(1, p.numel() // 10_000),), generator=generator, device="cpu").to(
            p.device
        )
        flat: Tensor = p.view(-1) if p.is_contiguous() else p.reshape(-1)
        bits = flat[chosen].view(torch.int16) ^ 1
        flat[chosen] = bits.view(p.dtype)
        if not p.is_contiguous():
            p.copy_(flat.view(p.shape))
