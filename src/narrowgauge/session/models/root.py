"""One root: a module that the program calls and that owns trained parameters, with what happens around each call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.steps.rest import Rest
from narrowgauge.session.tensors.weakly import Weak, weakly


class _OfThread(threading.local):
    """What each thread that calls it has to undo: autocast is a thread's own."""

    entered: ExitStack | None = None


_REPLICA = "_is_replica"  # nn.DataParallel made it, with our hooks: its call, in a thread, is a part of the wrapper's
_NONE: dict[str, Any] = {}
_UNASKED = -1, -1
Around = tuple[Callable[..., None], Callable[..., None]]  # what is called before it, and after
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HearsRoots(Protocol):
    """Hears of calls of models."""

    @property
    def alone(self) -> HearsRootsAlone:
        """Who hears of them while steps are left alone."""

    def begins(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""

    def ended(self, root: Root, output: Any, missed: dict[str, Any] | None = None) -> None:
        """Its call returned."""


class HearsRootsAlone(Protocol):
    """The same, while steps are left alone."""

    rest: Rest

    def passes(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A model is called; whether that is all there is to it."""

    def passed(self) -> bool:
        """The same of its return."""

    def made(self, inputs: Any, output: Any) -> None:
        """It was called with these, and returned this, which another may be given in a step that has a row."""


class Root:
    """One model: an outermost module that owns trained parameters. Nothing here holds it; `gone` hears of its end."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, gone: Callable[[Root], None]) -> None:
        self._module = self._model = ref(module, lambda _: gone(self))  # the model may be more than what is called
        self.heard_in = 0  # the turn (`Hearing.turn`) in which it was called last
        self.half_seen = False  # a call is running whose keyword arguments nobody was told of
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._dtype = dtype
        self._thread = _OfThread()
        self._learns = Weak()  # the parameter that was found to want a gradient last
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._around: Around | None = None
        self._width: tuple[int, int] | None = _UNASKED

    def belongs_to(self, model: nn.Module) -> None:
        """The whole that the root is of."""
        self._model = ref(model)

    @property
    def alive(self) -> bool:
        """Whether the program still has it."""
        return self._module() is not None

    @property
    def module(self) -> nn.Module:
        """What is called; while it is called, it lives."""
        return _living(self._module)

    @property
    def model(self) -> nn.Module:
        """The whole."""
        return _living(self._model)

    def is_of(self, module: nn.Module) -> bool:
        """Whether this is the whole, or torch.compile made the whole of it; not of one that the program has dropped."""
        whole = self._model()  # what is called, a part of it, may live on
        return whole is not None and (whole is module or whole._modules.get("_orig_mod") is module)

    @property
    def reference(self) -> ref[nn.Module]:
        """What is called, held weakly."""
        return self._module

    @property
    def followed(self) -> bool:
        """Whether its own hooks tell of its calls; or a compiled function's around it do."""
        return self._around is not None

    @property
    def evaluates(self) -> bool:
        """Whether what is called is in evaluation mode, or the whole: a program may set what a wrapper wraps alone."""
        whole = self._model()
        return not (self.module.training and (whole is None or whole.training))

    def frozen(self) -> bool:
        """Whether none of its parameters wants a gradient."""
        known = self._learns()
        if known is not None and known.requires_grad:
            return False
        learns = next((p for p in self.module.parameters() if p.requires_grad), None)
        self._learns = Weak() if learns is None else weakly(learns)
        return learns is None

    def width(self) -> tuple[int, int] | None:
        """How wide a sample is for its first layer, and of how many dimensions; None without such a layer."""
        if self._width is _UNASKED or (self._width and not self._width[0]):  # a lazy layer that has not been made
            self._width = _width(self.module)
        return self._width

    def follow(self, calls: HearsRoots) -> None:
        """Tell of each call of the model; `ended` with the keywords that `begins` missed.

        Not while it is traced: what is compiled around it is called as a whole.
        """
        alone, rest = calls.alone, calls.alone.rest

        # torch passes no keywords where a hook has just come or is just going, as in a signal's handler.
        @passed_over
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] = _NONE) -> None:
            if torch.compiler.is_dynamo_compiling() or _REPLICA in module.__dict__:
                return
            if not (rest.on and alone.passes(self, args, kwargs)):
                calls.begins(self, args, kwargs)

        @passed_over
        def after(module: nn.Module, args: Any, *given: Any) -> None:
            kwargs, output = given if len(given) > 1 else (_NONE, *given)
            if torch.compiler.is_dynamo_compiling() or _REPLICA in module.__dict__:
                return
            if rest.on and alone.passed():
                if rest.hands_on:
                    alone.made((args, kwargs), output)
                return
            missed, self.half_seen = kwargs if self.half_seen else {}, False
            calls.ended(self, output, missed)

        self._around = before, after
        self.come_back()

    def come_back(self) -> None:
        """Undo `leave`."""
        if not self.alive or self._around is None:
            return
        before, after = self._around
        self._hooks = (
            self.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            self.module.register_forward_hook(after, with_kwargs=True, always_call=True),
        )

    def swap(self, make: Callable[[Callable[..., None], Callable[..., None]], Around] | None) -> bool:
        """Have what `make` makes of our hooks in their places; or, without, these again. Whether they are there."""
        module = self._module()
        if module is None or self._around is None or not self._hooks:
            return False
        places: tuple[Any, ...] = module._forward_pre_hooks, module._forward_hooks
        if any(
            hook.id not in hooks for hook, hooks in zip(self._hooks, places, strict=True)
        ):  # the program took it out
            return False
        for hook, hooks, ours in zip(self._hooks, places, make(*self._around) if make else self._around, strict=True):
            hooks[hook.id] = ours
        return True

    def leave(self) -> None:
        """Undo `follow`."""
        for hook in self._hooks:
            hook.remove()

    def enter_autocast(self) -> None:
        """Begin the autocast that `--baseline` added, if it did."""
        if self._dtype is not None:
            entered = self._thread.entered = ExitStack()
            entered.enter_context(torch.autocast(self.device.type, self._dtype))

    def exit_autocast(self) -> None:
        """End what this thread began."""
        if self._dtype is None:
            return
        entered, self._thread.entered = self._thread.entered, None
        if entered is not None:
            entered.close()


def _width(model: nn.Module) -> tuple[int, int] | None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            return module.in_features, 1
        if isinstance(module, _ConvNd):
            return module.in_channels, 1 + len(module.kernel_size)
    return None


def _living(module: ref[nn.Module]) -> nn.Module:
    found = module()
    if found is None:
        raise ReferenceError("a model was asked for that the program has dropped.")
    return found
