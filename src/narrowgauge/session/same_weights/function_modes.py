"""Torch's stack of function modes, and three functions that pass it by.

A mode that is pushed inside of a `with` block of the script must not be on top when that block ends: leaving the block
pops whatever is on top. So a mode of ours goes to the bottom, just above the mode of `torch.set_default_device`, which
insists on being the lowest.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext


class Recorder(Protocol):
    """What `patches` tells about."""

    @property
    def recording(self) -> bool:
        """Whether it wants to see calls now."""
        ...

    def run(self, func: Any, name: str, args: Any, kwargs: Any, *, opaque: bool = False) -> Any:
        """Run `func` and return its result."""
        ...

    def loss_scaled(self, scaled: Any, scale: Any) -> None:
        """Hear that a gradient scaler made `scaled`."""
        ...


def _taken_down() -> list[TorchFunctionMode]:
    return [_pop_mode() for _ in range(len(_get_current_function_mode_stack()))][::-1]


def present() -> list[TorchFunctionMode]:
    """The modes that are on in this thread, the lowest first."""
    return list(_get_current_function_mode_stack())


def insert(mode: TorchFunctionMode) -> None:
    """Put `mode` under every other mode but the default device's."""
    stack = [m for m in _taken_down() if m is not mode]
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    lowest = 1 if stack and stack[0] is default else 0
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

    def apply(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or threading.get_ident() != home:
            return original(cls, *args, **kwargs)
        call = functools.partial(original, cls)
        return recorder.run(call, f"{cls.__name__}.apply", args, kwargs, opaque=True)

    def scale(original: Callable[..., Any], scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, outputs, *args, **kwargs)
        if scaled is not outputs and threading.get_ident() == home:
            recorder.loss_scaled(scaled, getattr(scaler, "_scale", None))
        return scaled

    undo.callback(_redirect(torch.autograd.Function.__dict__["apply"].__func__, _applied, "apply", apply))
    undo.callback(_redirect(inspect.unwrap(torch.amp.GradScaler.scale), _scaled, "scale", scale))
    backward = Tensor.__dict__["backward"]

    @functools.wraps(backward)
    def seen_backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == home:
            remove(recorder)  # type: ignore[arg-type]
        backward(self, *args, **kwargs)

    Tensor.backward = seen_backward  # type: ignore[method-assign]
    undo.callback(setattr, Tensor, "backward", backward)
    return undo


# `MyFunction.apply(loss(model(x)))` and `scaler.scale(loss(model(x)))` look the function up before the model is called,
# so replacing an attribute then comes too late. Replacing the function's code does not. The replacements run among the
# function's own globals and find their way back by import.
_SEEN: dict[str, Callable[..., Any]] = {}


def _applied(*args: Any, **kwargs: Any) -> Any:
    from narrowgauge.session.same_weights.function_modes import _SEEN as SEEN

    return SEEN["apply"](*args, **kwargs)


def _scaled(*args: Any, **kwargs: Any) -> Any:
    from narrowgauge.session.same_weights.function_modes import _SEEN as SEEN

    return SEEN["scale"](*args, **kwargs)


def _redirect(
    function: FunctionType, by: Callable[..., Any], name: str, handler: Callable[..., Any]
) -> Callable[[], None]:
    """Let calls of `function`, whoever holds it, end in `handler(original, ...)`; the returned function undoes it."""
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    _SEEN[name] = functools.partial(handler, original)
    replacement: CodeType = by.__code__
    function.__code__ = replacement.replace(co_freevars=code.co_freevars)

    def restore() -> None:
        function.__code__ = code

    return restore
