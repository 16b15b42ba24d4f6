"""torch's loss functions, heard where they reach C++.

What a program holds of them (an attribute, a default, a table of losses, a pickle) stays torch's own function: in its
place nothing stands, only below it. Those that torch computes in Python (`gaussian_nll_loss`,
`multilabel_soft_margin_loss`, `triplet_margin_with_distance_loss`) are not heard.

A weighted `huber_loss` reaches C++ unreduced, and is weighted and reduced here as torch is about to. A weighted
`mse_loss` or `l1_loss` is `torch.pow`, a product and `torch.sum`, which programs call for anything: it is not heard.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from types import CodeType, FrameType
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
    (torch, "ctc_loss", 5),
    (torch, "poisson_nll_loss", 5),
    (torch, "triplet_margin_loss", 7),
    (torch, "cosine_embedding_loss", 4),
    (torch, "margin_ranking_loss", 4),
    (torch, "hinge_embedding_loss", 3),
    (torch._C._nn, "multi_margin_loss", 5),
    (torch._C._nn, "multilabel_margin_loss", 2),
    (torch._C._nn, "soft_margin_loss", 2),
)
_OWNERS = {name: owner for owner, name, _ in _KERNELS}
_NONE, _MEAN, _SUM = range(3)
_KL_DIV, _HUBER = F.kl_div.__code__, F.huber_loss.__code__
Told = Callable[[str, Tensor, tuple[Any, ...], bool], None]


def follow(
    seams: Seams, told: Told, mine: Callable[[], bool], trained: Callable[[str], None]
) -> Callable[[Collection[str]], None]:
    """Until the seams are closed, what such a function returns without gradients, where the thread is `mine`.

    `told(function, loss, arguments, summed)`: `summed` is whether it is a sum over the batch. `trained(function)` hears
    of those that are called with gradients. Returns what has those of these names called for that by one function, for
    a while in which nobody asks.
    """
    for owner, name, place in _KERNELS:
        original = getattr(owner, name, None)
        if original is not None:
            seams.replace(owner, name, functools.partial(_listen, told, mine, trained, name, place), overridable=True)
            same_to_torchscript(original, getattr(owner, name))

    def shorten(names: Collection[str]) -> None:
        for name in names:
            seams.swap(_OWNERS[name], name, _trains)

    return shorten


def _trains(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if torch.is_grad_enabled() else ours(*args, **kwargs)

    same_to_torchscript(original, run)
    return run


def _listen(
    told: Told,
    mine: Callable[[], bool],
    trained: Callable[[str], None],
    name: str,
    place: int,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():  # a look from inside would break the graph
            return loss
        if torch.is_grad_enabled():
            trained(name)
        elif not (inside_backward() or capturing() or unreal()) and mine():
            reduction = kwargs.get("reduction", args[place] if len(args) > place else 1)
            unseen_by_modes(_tell, told, name, loss, args, reduction)
        return loss

    return run


def _tell(told: Told, name: str, loss: Any, args: tuple[Any, ...], reduction: int) -> None:
    if not isinstance(loss, Tensor) or loss.is_meta:
        return
    if reduction == _SUM and (given := _asked_by(_KL_DIV)) is not None:
        if given["reduction"] == "batchmean" and given["input"].dim():
            loss, reduction = loss / int(given["input"].size(0)), _MEAN
    elif reduction == _NONE and (given := _asked_by(_HUBER)) is not None:
        weight = given.get("weight")
        if weight is not None and given["reduction"] == "mean":
            loss, reduction = (loss * weight).mean(), _MEAN
        elif weight is not None and given["reduction"] == "sum":
            loss, reduction = (loss * weight).sum(), _SUM
    told(name, loss, args, reduction == _SUM)


def _asked_by(code: CodeType) -> dict[str, Any] | None:
    """What a function of torch's has been given that asks for the loss, and will do more with it; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return frame.f_locals
        frame = frame.f_back
    return None
