"""A process that is still being prepared does not train yet: what it is given may be another's to train.

multiprocessing starts a process by `spawn` or `forkserver`, and it runs the program's own module once more and
unpickles what it was given, before it begins. So a data loader's worker has the program's optimizer, and never uses it.

    prepared     the optimizers of that time are kept, and nothing else is done
    trains       a module that holds their parameters is called with gradients, or a backward pass begins

Source: CPython, `multiprocessing.spawn._main` and `multiprocessing.forkserver.main`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from multiprocessing import process
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.session.doors.unseen import unseen


def preparing() -> bool:
    """Whether multiprocessing is still preparing this process."""
    return getattr(process.current_process(), "_inheriting", False)


class Prepared:
    """Optimizers of a process that was being prepared when they were made.

    Args:
        trains: told once that the process trains, with those that are still there.
    """

    def __init__(self, trains: Callable[[Sequence[Optimizer]], None]) -> None:
        self._trains = trains
        self._optimizers = WeakSet[Optimizer]()
        self._doors: tuple[Any, Any] | None = None  # ours, while we listen
        self._call, self._backward = nn.Module.__call__, torch.autograd.backward

    def keep(self, optimizer: Optimizer) -> None:
        """Know of one more."""
        self._optimizers.add(optimizer)
        if self._doors is None:
            self._open()

    def end(self) -> list[Optimizer]:
        """Listen no more; the optimizers."""
        if self._doors is not None:
            call, backward = self._doors
            if nn.Module.__call__ is call:  # unless somebody else has wrapped it since
                nn.Module.__call__ = self._call  # type: ignore[method-assign]
            if torch.autograd.backward is backward:
                torch.autograd.backward = self._backward
            self._doors = None
        kept = list(self._optimizers)
        self._optimizers.clear()
        return kept

    def _open(self) -> None:
        call, backward = self._call, self._backward

        @unseen
        @functools.wraps(call)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling() and self._held_by(module):
                self._begin()
            return call(module, *args, **kwargs)

        @unseen
        @functools.wraps(backward)
        def passes(*args: Any, **kwargs: Any) -> Any:
            outermost = torch.autograd.backward is passes  # then who begins to listen now hears of this one, too
            self._begin()
            return (torch.autograd.backward if outermost else backward)(*args, **kwargs)

        self._doors = called, passes
        nn.Module.__call__, torch.autograd.backward = called, passes  # type: ignore[method-assign]

    def _held_by(self, module: nn.Module) -> bool:
        """Whether a module has a parameter of one of the optimizers."""
        if self._doors is None or next(module.parameters(), None) is None:
            return False
        ours = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        return any(id(p) in ours for p in module.parameters())

    def _begin(self) -> None:
        if self._doors is not None and (kept := self.end()):
            self._trains(kept)
