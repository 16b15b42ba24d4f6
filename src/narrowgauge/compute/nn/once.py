"""Gradients that nobody may differentiate: they are products of codes, and rounding has no derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import ConversionError

TWICE = (
    "trying to differentiate twice a converted layer: its gradients are products of FP8 codes, which have no "
    "derivative. Leave out what is differentiated twice, a critic under a gradient penalty say (skip=..., or `skip` of "
    "[convert] in a settings file, --config), or revert the model."
)

FORWARD_MODE = (
    "a converted layer was asked for a derivative in forward mode (torch.autograd.forward_ad), and its FP8 products "
    "have the one that backward gives. Use torch.autograd.grad, leave the layer out (skip=..., or `skip` of [convert] "
    "in a settings file, --config), or revert the model."
)


def once(gradients: Callable[[Any, Tensor], tuple[Tensor | None, ...]], ctx: Any, dy: Tensor) -> Any:
    """`gradients(ctx, dy)`, which whoever differentiates them (`create_graph`) is refused: RuntimeError.

    torch's `once_differentiable` would let them pass as constants where dy is one: dx depends on w, and dw on x.
    """
    if not torch.is_grad_enabled():
        return gradients(ctx, dy)
    with torch.no_grad():
        found = gradients(ctx, dy)
    refused = torch._C._functions.DelayedError(TWICE.encode(), len(found))
    return refused(*(None if g is None else g.detach().requires_grad_() for g in found))  # type: ignore[arg-type]


def no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    """The `jvp` of a converted layer: ConversionError. Without one, torch advises to write it."""
    raise ConversionError(FORWARD_MODE)
