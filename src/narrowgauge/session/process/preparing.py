"""A process that is still being prepared does not train yet: what it is given may be another's to train.

multiprocessing starts a process by `spawn` or `forkserver`, and it runs the program's own module once more and
unpickles what it was given, before it begins. So a data loader's worker has the program's optimizer, and never uses it.

    prepared     the optimizers of that time are kept, and nothing else is done
    trains       a module that holds their parameters is called with gradients, a backward pass begins, or one steps

Source: CPython, `multiprocessing.spawn._main` and `multiprocessing.forkserver.main`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from multiprocessing import process
from typing import Any
from weakref import ReferenceType, ref

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
        self._kept: dict[int, ReferenceType[Optimizer]] = {}  # by id: one need not be hashable
        self._held = frozenset[int]()  # the ids of their parameters
        self._undo: list[Callable[[], None]] = []  # what we stand at, while we listen
        self._lock = threading.Lock()
        self._here = threading.local()  # whether the thread is in a call that was asked about

    def keep(self, optimizer: Optimizer) -> None:
        """Know of one more."""
        self._kept[id(optimizer)] = ref(optimizer)
        self._held |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self._undo:
            self._stand_at(nn.Module, "__call__", self._called)
            self._stand_at(torch.autograd, "backward", self._passes)
        if not hasattr(type(optimizer).step, "asks"):
            self._stand_at(type(optimizer), "step", self._steps)

    def end(self) -> list[Optimizer]:
        """Listen no more; the optimizers."""
        with self._lock:
            undo, self._undo = self._undo, []
            kept, self._kept, self._held = self._kept, {}, frozenset()
        for each in undo:
            each()
        return [optimizer for at in kept.values() if (optimizer := at()) is not None]

    def _begin(self) -> None:
        if self._undo and (kept := self.end()):
            self._trains(kept)

    def _stand_at(self, owner: Any, name: str, door: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        ours: Any = functools.wraps(before)(unseen(door(before)))
        ours.asks = True
        setattr(owner, name, ours)

        def undo() -> None:
            if getattr(owner, name) is ours:  # unless somebody else has wrapped it since
                setattr(owner, name, before)

        self._undo.append(undo)

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            here = self._here
            if not self._undo or getattr(here, "asked", False) or torch.compiler.is_dynamo_compiling():
                return call(module, *args, **kwargs)
            here.asked = True
            try:
                if torch.is_grad_enabled() and any(id(p) in self._held for p in module.parameters()):
                    self._begin()
                return call(module, *args, **kwargs)
            finally:
                here.asked = False

        return run

    def _passes(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            outermost = torch.autograd.backward  # if that is ours, who begins to listen now hears of this pass, too
            self._begin()
            now = torch.autograd.backward
            heard = getattr(outermost, "asks", False) and not getattr(now, "asks", False)
            return (now if heard else backward)(*args, **kwargs)

        return run

    def _steps(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._begin()
            return step(optimizer, *args, **kwargs)

        return run
