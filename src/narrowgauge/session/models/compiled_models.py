"""Calls of compiled functions as those of models: inside of one nobody is told of calls, so it is called as a whole.

a module that was compiled       is a model, if it owns what is trained
a function, before any model     is the call of the whole that the optimizers train
any other, or inside of a call   is none
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.session.doors.hearing import Hearing, heard, heard_if
from narrowgauge.session.models.calls import Calls
from narrowgauge.session.models.root import Root
from narrowgauge.session.models.roots import Roots
from narrowgauge.session.steps.same_training import SameTraining
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.trained import Trained


class CompiledModels:
    """Tells a session's calls of them.

    Args:
        calls, roots, steps, hearing, same: the session's.
        optimizers: those that the program made and still holds.
    """

    def __init__(
        self, calls: Calls, roots: Roots, steps: Steps, hearing: Hearing, same: SameTraining, optimizers: Trained
    ) -> None:
        self._calls, self._roots, self._steps = calls, roots, steps
        self.hearing, self._same, self._optimizers = hearing, same, optimizers
        self._known: dict[int, Root] = {}  # by the id of what was compiled

    @heard_if(lambda self, owner, args, kwargs: self._same_compiled(owner))
    def compiled_begins(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Root | None:
        """A compiled function, or a module compiled in place, is called: as a model, unless one is being called."""
        if self._calls.running or not self._optimizers or inside_backward():
            return None
        root = self._known.get(id(owner))
        if root is None or not root.alive:  # or an address that is used again
            root = self._take(owner)
            if root is None:
                return None
            self._known[id(owner)] = root
        self._calls.begins(root, args, kwargs)
        return root

    def learns(self) -> bool:
        """As of any call."""
        return self._calls.learns()

    def _same_compiled(self, owner: Any) -> bool | None:
        if not self._calls.learns() or not self._optimizers:
            return None
        root = self._known.get(id(owner))
        if root is not None and root.alive:
            return self._same.model(root)
        module = self._model(owner)
        return None if module is None else self._same.module(module)

    @heard
    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's compiled step is called, and no forward or backward in it: what it ends is seen as a whole."""
        if optimizer in self._optimizers and not inside_backward():
            self._steps.looked()

    def compiled_ended(self, known: Root | None, output: Any) -> None:
        """Its call returned."""
        self._settle()
        if known is not None:
            self._calls.ended(known, output)

    @heard
    def _settle(self) -> None:
        self._steps.settle()

    def _take(self, owner: Any) -> Root | None:
        module = self._model(owner)
        return None if module is None or module in self._roots else self._calls.take(module)

    def _model(self, owner: Any) -> nn.Module | None:
        if not torch.is_grad_enabled():
            return None
        if isinstance(owner, nn.Module):
            return owner if self._optimizers.owns(owner) else None
        return self._roots.whole(self._optimizers) if not len(self._roots) else None
