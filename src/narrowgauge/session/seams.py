"""Where a running PyTorch program can be watched and changed without editing it.

Each seam is one function of torch's that every training program must pass: making an optimizer, calling a module,
`backward`, an optimizer's step. `Seams` replaces or hooks them, tells who listens, and can undo it all.

    held      torch's module registration hook             which module is a part of which
    made      torch.optim.Optimizer.__init__               which parameters are trained
    called    torch's global forward pre-hook              the outermost call of a module that owns such parameters
    backward  torch.autograd.backward                      the loss (Tensor.backward goes through it)
    stepped   torch's global optimizer step hooks          the end of a step
    scaled    torch.amp.GradScaler.scale / .step           the loss before scaling; steps that were skipped
    clipped   torch.nn.utils.clip_grad_norm_               the gradient norm before clipping, for nothing
    compiled  torch.compile, nn.Module.compile             turned into no-ops, and told; or let be (`compiled_calls`)

What is compiled must stay so: our hooks do nothing while a graph is traced, and leave no trace in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class HearsMaking(Protocol):
    """Hears of what the program makes."""

    def module_registered(self, parent: nn.Module, child: nn.Module | None) -> None:
        """A module got a submodule."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer was constructed."""

    def compile_refused(self) -> None:
        """torch.compile was asked for."""


class HearsCalls(Protocol):
    """Hears of modules."""

    def module_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is about to run its forward."""


class HearsUpdates(Protocol):
    """Hears of backward passes and optimizers."""

    def loss_scaled(self, scaler: Any, before: Any, after: Any) -> None:
        """A gradient scaler turned `before` into `after`."""

    def backward_begins(self, loss: Any, plain: bool) -> None:
        """`backward(loss)` is called; `plain` if with nothing else."""

    def backward_ended(self, loss: Any) -> None:
        """It returned."""

    def gradients_clipped(self, norm: Tensor) -> None:
        """Gradients were clipped; `norm` is theirs from before."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def step_ended(self, optimizer: Optimizer) -> None:
        """It stepped."""

    def scaler_stepped(self, scaler: Any, optimizer: Optimizer) -> None:
        """A gradient scaler stepped, or skipped."""


def in_backward() -> bool:
    """Whether this code runs inside a backward pass (a recomputed forward, a nested backward)."""
    return int(torch._C._current_graph_task_id()) != -1


class Seams:
    """All seams of one process; `close()` leaves torch as it was found."""

    def __init__(
        self, making: HearsMaking, calls: HearsCalls, updates: HearsUpdates, *, compiling: bool = False
    ) -> None:
        self._undo = ExitStack()
        self._open(making, calls, updates, compiling)

    def close(self) -> None:
        """Undo every replacement and hook, in reverse order."""
        self._undo.close()

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `make(original)` in the place of `owner.name` until closed."""
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original)))
        self._undo.callback(setattr, owner, name, original)

    def _open(self, making: HearsMaking, calls: HearsCalls, updates: HearsUpdates, compiling: bool) -> None:
        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                making.optimizer_made(self)

            return init

        def backward(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(tensors: Any, *args: Any, **kwargs: Any) -> None:
                if in_backward():  # a reentrant checkpoint's own backward is no new microbatch
                    original(tensors, *args, **kwargs)
                    return
                plain = not any(a is not None and a is not False for a in (*args, *kwargs.values()))
                updates.backward_begins(tensors, plain)
                original(tensors, *args, **kwargs)
                updates.backward_ended(tensors)

            return run

        def scale(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(self: Any, outputs: Any) -> Any:
                scaled = original(self, outputs)
                updates.loss_scaled(self, outputs, scaled)
                return scaled

            return run

        def scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                out = original(self, optimizer, *args, **kwargs)
                updates.scaler_stepped(self, optimizer)
                return out

            return run

        def clip(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                norm = original(*args, **kwargs)
                updates.gradients_clipped(norm)
                return norm

            return run

        def no_compile(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(model: Any = None, *args: Any, **kwargs: Any) -> Any:
                making.compile_refused()
                return (lambda function: function) if model is None else model

            return run

        def no_module_compile(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(self: nn.Module, *args: Any, **kwargs: Any) -> None:
                making.compile_refused()

            return run

        def called(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not torch.compiler.is_compiling():  # while a graph is traced nothing is called yet
                calls.module_called(module, args)

        self.replace(Optimizer, "__init__", made)
        self.replace(torch.autograd, "backward", backward)
        self.replace(torch.amp.GradScaler, "scale", scale)
        self.replace(torch.amp.GradScaler, "step", scaler_step)
        self.replace(torch.nn.utils, "clip_grad_norm_", clip)
        self.replace(torch.nn.utils.clip_grad, "clip_grad_norm_", clip)
        if not compiling:
            self.replace(torch, "compile", no_compile)
            self.replace(nn.Module, "compile", no_module_compile)
        handles = (
            nn.modules.module.register_module_module_registration_hook(
                lambda parent, name, child: making.module_registered(parent, child)
            ),
            nn.modules.module.register_module_forward_pre_hook(called),
            register_optimizer_step_pre_hook(lambda opt, args, kwargs: updates.step_begins(opt)),
            register_optimizer_step_post_hook(lambda opt, args, kwargs: updates.step_ended(opt)),
        )
        for handle in handles:
            self._undo.callback(handle.remove)
