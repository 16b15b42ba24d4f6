"""By which of its models' returned losses a program trains: each model is asked of its own.

Where several models are called before a backward, nothing is said of any.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch import Tensor

from narrowgauge.session.steps.returned import ReturnedLosses


class TrainsBy:
    """The returned losses of each of a program's models."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, ReturnedLosses] = WeakKeyDictionary()
        self._since: dict[int, ReturnedLosses] = {}  # of those that were called since the last backward
        self._gone: list[ReturnedLosses] = []  # of models that are, for the notes

    def of(self, model: Any) -> ReturnedLosses:
        """Those of one, which lives on as it would."""
        found = self._of.get(model)
        if found is None:
            found = self._of[model] = ReturnedLosses()
            finalize(model, self._forget, found).atexit = False
        return found

    def called(self, model: Any) -> ReturnedLosses:
        """A call with gradients of this model ended: its losses."""
        found = self.of(model)
        self._since[id(found)] = found
        return found

    @property
    def waits(self) -> bool:
        """Whether a model was called with gradients, and backward not since."""
        return bool(self._since)

    def training_changed(self) -> None:
        """Other parameters are trained now."""
        for each in self._of.values():
            each.training_changed()

    def backward(self, losses: Any, number: Tensor | None = None) -> None:
        """Backward is called on this, or these; `number`: what that is without a scaler's scale, if there is one."""
        since, self._since = list(self._since.values()), {}
        for each in since:
            if len(since) == 1:
                each.backward(losses, number)
            else:
                each.passed()

    def notes(self, of: int) -> list[str]:
        """What of so many losses of evaluations models' calls returned that are not what the program trains by."""
        counted, multiplied, ranks = {True: 0, False: 0}, 0, 1
        for each in (*self._gone, *self._of.values()):
            if each.by_ranks > 1:
                multiplied, ranks = multiplied + each.evaluated, each.by_ranks
            if each.otherwise:
                counted[each.partly] += each.evaluated
        told = f"{{}} of {of} losses of evaluations are what the model's call returned, "
        why = {
            True: "which is only a part of what backward was called on: eval_loss has nothing of the rest.",
            False: "which backward was not called on, nor on anything made of it: eval_loss need not be a "
            "measure beside the training loss.",
        }
        notes = [told.format(counted[partly]) + why[partly] for partly in (True, False) if counted[partly]]
        if multiplied:
            notes.append(
                f"{told.format(multiplied)}which the program multiplies by {ranks}, the number of its ranks, before "
                "backward: eval_loss is without that."
            )
        return notes

    def _forget(self, found: ReturnedLosses) -> None:
        if found.otherwise or found.compared:
            self._gone.append(found)
