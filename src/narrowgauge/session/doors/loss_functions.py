"""torch's loss functions, heard where they reach C++.

What a program holds of them (an attribute, a default, a table of losses, a pickle) stays torch's own function: in its
place nothing stands, only below it.

A weighted `mse_loss`, `l1_loss` or `huber_loss` is a product and a sum of torch's, and not heard.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.session.doors.hearing import capturing, unreal
from narrowgauge.session.doors.scripted import same_to_torchscript
from narrowgauge.session.doors.seams import Seams

# Where each is looked up as it is called, and which of its arguments is the reduction.
_KERNELS: tuple[tuple[Any, str, int], ...] = (
    (torch._C._nn, "cross_entropy_loss", 3),
    (torch._C._nn, "nll_loss_nd", 3),
    (torch._C._nn, "mse_loss", 2),
    (torch._C._nn, "l1_loss", 2),
    (torch._C._nn, "smooth_l1_loss", 2),
    (torch._C._nn, "huber_loss", 2),
    (torch._C._nn, "binary_cross_entropy", 3),
    (torch, "binary_cross_entropy_with_logits", 4),
    (torch, "kl_div", 2),
)
_SUM = 2
_KL_DIV = F.kl_div.__code__
Told = Callable[[Tensor, tuple[Any, ...], bool], None]


def follow(seams: Seams, told: Told, mine: Callable[[], bool]) -> None:
    """Until the seams are closed, what such a function returns without gradients, where the thread is `mine`.

    `told(loss, arguments, summed)`: `summed` is whether it is a sum over the batch.
    """
    for owner, name, place in _KERNELS:
        original = getattr(owner, name, None)
        if original is not None:
            seams.replace(owner, name, functools.partial(_listen, told, mine, place), overridable=True)
            same_to_torchscript(original, getattr(owner, name))


def _listen(told: Told, mine: Callable[[], bool], place: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        if torch.compiler.is_compiling():  # a look from inside would break the graph
            return loss
        if not torch.is_grad_enabled() and not (inside_backward() or capturing() or unreal()) and mine():
            reduction = kwargs.get("reduction", args[place] if len(args) > place else 1)
            unseen_by_modes(_tell, told, loss, args, reduction == _SUM)
        return loss

    return run


def _tell(told: Told, loss: Any, args: tuple[Any, ...], summed: bool) -> None:
    if isinstance(loss, Tensor) and not loss.is_meta:
        rows = _rows_of_batchmean() if summed else None
        told(loss if rows is None else loss / rows, args, summed and rows is None)


def _rows_of_batchmean() -> int | None:
    """By how many rows `F.kl_div` is about to divide the sum that it asked for, if it is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _KL_DIV:
            given = frame.f_locals
            return int(given["input"].size(0)) if given["reduction"] == "batchmean" and given["input"].dim() else None
        frame = frame.f_back
    return None
