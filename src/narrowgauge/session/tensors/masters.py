"""Master weights: an optimizer steps copies in float32, and the program copies them back into its model, rounded.

    masters = [p.float().clone() for p in model.parameters()]            one for each, in any order
    masters = [torch.cat([p.float().flatten() for p in parameters])]     or all of them in one

So no parameter of the model is in an optimizer. What tells is their values: a model's weights are what the masters
round to. Another model of the same values (an average of it, a target network) has them in the same precision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

ROUNDED = (torch.bfloat16, torch.float16)
LOOKED_AT = 256  # elements of a tensor; the device is waited for, once for each
TRIES = 8  # masters of one shape that a parameter is held against


def copies_of(module: nn.Module, held: Iterable[Tensor]) -> list[Tensor]:
    """The parameters of `module`, if most of their elements are what tensors that optimizers hold round to; else []."""
    masters = [m for m in held if _plain(m) and m.is_floating_point() and m.dtype not in ROUNDED]
    found: list[Tensor] = [p for p in module.parameters() if p.requires_grad and _plain(p) and p.dtype in ROUNDED]
    if not masters or not found:
        return []
    if any(_flat(found, master) for master in masters if master.dim() == 1):
        return found
    of_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for master in masters:
        of_shape[master.shape].append(master)
    copied: list[Tensor] = []
    for p in found:
        left = of_shape[p.shape]
        at = next((n for n, master in enumerate(left[:TRIES]) if _rounds_to(master, p)), None)
        if at is not None:
            del left[at]
            copied.append(p)
    telling = any(_varied(p) for p in copied)  # zeros and ones round to themselves anywhere
    enough = 2 * sum(p.numel() for p in copied) > sum(p.numel() for p in found)
    return copied if telling and enough else []


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def _rounds_to(master: Tensor, p: Tensor) -> bool:
    return torch.equal(_some(master).to(p.dtype), _some(p))


def _flat(parameters: list[Tensor], master: Tensor) -> bool:
    """Whether `master` is all of them, one after the other."""
    if len(parameters) < 2 or master.numel() != sum(p.numel() for p in parameters):
        return False
    at, telling = 0, False
    for p in parameters:
        if not _rounds_to(master[at : at + p.numel()], p):
            return False
        at, telling = at + p.numel(), telling or _varied(p)
    return telling


def _varied(p: Tensor) -> bool:
    some = _some(p)
    return bool((some != some[:1]).any())


def _some(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:LOOKED_AT].cpu()
