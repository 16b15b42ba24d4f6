"""What a program makes: modules that hold others, optimizers, compiled functions.

held      torch's module registration hook         which module is a part of which
made      torch.optim.Optimizer.__init__           which parameters are trained
          torch.optim.Optimizer.__setstate__       the same, of one that is copied or unpickled
          torch.optim.Optimizer.add_param_group    the same, of one that is known: another group of them
compiled  torch.compile, nn.Module.compile         turned into no-ops, and told; or let be (`compiled_calls`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.seams import Seams


class HearsMaking(Protocol):
    """Hears of what the program makes."""

    def module_registered(self, parent: nn.Module, child: nn.Module | None) -> None:
        """A module got a submodule."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer was constructed."""

    def optimizer_restored(self, optimizer: Optimizer) -> None:
        """An optimizer got a state as a whole: one that was copied or unpickled, or one that is known."""

    def optimizer_grown(self, optimizer: Optimizer) -> None:
        """An optimizer, known or just being made, got another group of parameters."""

    def compile_refused(self, function: Any) -> None:
        """torch.compile was asked for, of a function or a module."""


def follow(seams: Seams, making: HearsMaking, *, compiling: bool) -> None:
    """Tell `making` until the seams are closed; unless `compiling`, torch.compile does nothing until then."""

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            making.optimizer_made(self)

        return init

    def restored(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(self: Optimizer, state: Any) -> None:
            original(self, state)
            making.optimizer_restored(self)

        return set_state

    def grown(original: Callable[..., Any]) -> Callable[..., Any]:
        def add(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            making.optimizer_grown(self)

        return add

    def no_compile(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            making.compile_refused(model)
            return (lambda function: function) if model is None else model

        return run

    def no_module_compile(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            making.compile_refused(self)

        return run

    def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if not torch.compiler.is_dynamo_compiling():  # a slice of a list of modules is a list of its own
            making.module_registered(parent, child)

    seams.replace(Optimizer, "__init__", made)
    seams.replace(Optimizer, "__setstate__", restored)
    seams.replace(Optimizer, "add_param_group", grown)
    if not compiling:
        seams.replace(torch, "compile", no_compile)
        seams.replace(nn.Module, "compile", no_module_compile)
    # With all that it calls: torch makes modules as it compiles a backward pass, and compiles what is called meanwhile.
    passed_over(registered, below=True)
    seams.on_close(nn.modules.module.register_module_module_registration_hook(registered).remove)
