"""Torch's stack of function modes, and three functions that pass it by.

A mode that is pushed inside of a `with` block of the script must not be on top when that block ends: leaving the block
pops whatever is on top. So a mode of ours goes to the bottom, just above torch's own default-device mode, which insists
on being the lowest.
"""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext


class Recorder(Protocol):
    """What `patches` tells about."""

    @property
    def recording(self) -> bool: ...
    def run(self, func: Any, name: str, args: Any, kwargs: Any, *, opaque: bool = False) -> Any: ...
    def loss_scaled(self, scaled: Any, scale: Any) -> None: ...
    def stop(self) -> None: ...


def _taken_down() -> list[TorchFunctionMode]:
    return [_pop_mode() for _ in range(len(_get_current_function_mode_stack()))][::-1]


def insert(mode: TorchFunctionMode) -> None:
    """Put `mode` under every other mode but the default device's."""
    stack = [m for m in _taken_down() if m is not mode]
    lowest = 1 if stack and isinstance(stack[0], DeviceContext) else 0
    for each in (*stack[:lowest], mode, *stack[lowest:]):
        _push_mode(each)


def remove(mode: TorchFunctionMode) -> None:
    """Take `mode` off, wherever it is; nothing happens when it is not there."""
    if mode in _get_current_function_mode_stack():
        for each in _taken_down():
            if each is not mode:
                _push_mode(each)


def others() -> list[str]:
    """The names of the modes that the script itself has on, torch's default device excepted."""
    return [type(m).__name__ for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext)]


def patches(recorder: Recorder) -> ExitStack:
    """Have `recorder` see what no function mode sees; closing the returned stack undoes it.

    Custom autograd functions are called past the modes, a scaled loss does not know its scale, and inside of
    `Tensor.backward` a mode can no longer be taken off, so it has to be beforehand.
    """
    undo = ExitStack()
    home = threading.get_ident()
    apply = torch.autograd.Function.__dict__["apply"]
    scale = torch.amp.GradScaler.__dict__["scale"]
    backward = Tensor.__dict__["backward"]

    @functools.wraps(apply.__func__)
    def seen_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or threading.get_ident() != home:
            return apply.__func__(cls, *args, **kwargs)
        call = functools.partial(apply.__func__, cls)
        return recorder.run(call, f"{cls.__name__}.apply", args, kwargs, opaque=True)

    @functools.wraps(scale)
    def seen_scale(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if scaled is not outputs:
            recorder.loss_scaled(scaled, getattr(self, "_scale", None))
        return scaled

    @functools.wraps(backward)
    def seen_backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == home:
            remove(recorder)  # type: ignore[arg-type]
        backward(self, *args, **kwargs)

    for owner, name, original, new in (
        (torch.autograd.Function, "apply", apply, classmethod(seen_apply)),
        (torch.amp.GradScaler, "scale", scale, seen_scale),
        (Tensor, "backward", backward, seen_backward),
    ):
        setattr(owner, name, new)
        undo.callback(setattr, owner, name, original)
    return undo
