"""Hooks on a layer of TransformerEngine's, and the one that keeps the whole layer out of FP8 for a call.

    before a call       autocast(enabled=False)
    after               as it was; the backward goes with the forward

What is not in FP8 to begin with is left alone. A copy or a pickle of the layer has hooks that switch nothing: what a
program copies is not the model that it trains. Under torch.compile the graph is broken at them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import torch
from torch import nn

from narrowgauge.errors import in_one_line
from narrowgauge.session.sites.transformer_engine import KEPT_HIGH

PYTORCH = "transformer_engine.pytorch"


class Hook(ABC):
    """One layer's; `reached`: a call of it was in FP8 otherwise; `problem`: why it could not be done."""

    def __init__(self) -> None:
        self.reached, self.problem = False, ""
        self._handles: list[Any] = []
        # Traced into a graph, what a hook changes outside of it would be changed once.
        self._run = torch.compiler.disable(self._safely)

    def __call__(self, *call: Any) -> None:
        """As a pre-hook with (module, args, kwargs), as a forward hook with (module, args, output)."""
        self._run(*call)

    def __reduce__(self) -> Any:
        return Nothing, ()

    def _safely(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        try:
            self.before(module, args, kwargs)
        except Exception as error:
            self.problem = self.problem or in_one_line(error)
            self.end(module)

    def begin(self, module: nn.Module, *, now: bool) -> None:
        """From the next call on, or from the one that runs `now` and will not hear of new hooks."""
        self._handles.append(module.register_forward_pre_hook(self, with_kwargs=True))
        forget_weights(module)
        if now:
            self(module, (), {})

    def end(self, module: nn.Module | None) -> None:
        """Leave the layer as it was; twice is harmless."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @abstractmethod
    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The call begins, or ended."""


class Nothing:
    """What a copied layer has; FP8 weights that were kept and copied with it are dropped as it is first called."""

    def __init__(self) -> None:
        self.reached = False

    def __call__(self, *call: Any) -> None:
        """Drop them, once: our quantizers made them, and the copy has the layer's own."""
        if not self.reached and not torch.compiler.is_dynamo_compiling():
            self.reached = True
            forget_weights(call[0])

    def __reduce__(self) -> Any:
        return Nothing, ()


class Whole(Hook):
    """The layer is called outside of its autocast."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[Any] = []
        self._after = _After(self)

    def begin(self, module: nn.Module, *, now: bool) -> None:
        """From the next call on, or from this one."""
        self._handles.append(module.register_forward_hook(self._after, prepend=True, always_call=True))
        KEPT_HIGH.add(module)
        super().begin(module, now=now)

    def end(self, module: nn.Module | None) -> None:
        """Leave the layer as it was."""
        super().end(module)
        self._drop()
        if module is not None:
            KEPT_HIGH.discard(module)

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The call begins."""
        self._drop()
        state = fp8_state()
        if not (state.is_fp8_enabled() or state.is_fp8_calibration()):
            return
        self.reached = True
        outside = _autocast()(False, False, state.get_fp8_recipe())
        outside.__enter__()
        self._open.append(outside)

    def leave(self) -> None:
        """The call ended."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def _drop(self) -> None:
        """Count the end of a call that was interrupted, where the autocast around it has ended since."""
        if self._open:
            state = fp8_state()
            now = state.get_autocast_state()
            self.leave()
            state.set_autocast_state(now)


class _After(Hook):
    def __init__(self, of: Whole) -> None:
        super().__init__()
        self._of = of

    def before(self, module: Any, args: Any, output: Any) -> None:
        self._of.leave()


def forget_weights(module: Any) -> None:
    """The FP8 copies of weights that are kept for further microbatches: made by other quantizers."""
    getattr(module, "_fp8_workspaces", {}).clear()


def fp8_state() -> Any:
    """The class that knows whether FP8 is on, and its recipe."""
    return import_module(f"{PYTORCH}.quantization").FP8GlobalStateManager


def _autocast() -> Any:
    return import_module(PYTORCH).autocast
