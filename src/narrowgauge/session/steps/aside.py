"""Seconds between two steps in which models were called without gradients: no step's, unless it learns of those calls.

    model(x)                          an evaluation, a rollout: no step's
    averaged(x); F.mse_loss(...)      of a model that does not train, to a loss without gradients: an evaluation as well
    y = teacher(x); F.mse_loss(model(x), y)          no loss without gradients came of it: the step's
    model(x); ...; model(x) with gradients           the same batch once more: gradient caching's first pass, the
                                                     probabilities before the update. It is the step's
    loss = model(x); model(x) without, before backward     what a reference says of the batch. It is the step's as well,
                                                     and nobody tells of it here

An evaluation may be on the batch that the next step has (all nodes of a graph): it is told by its loss, or by a model
in evaluation mode that is trained on it next. If another model is, the first one teaches: it was trained before. Of a
model that does not train the batch alone tells: a teacher's own loss may be looked at, too.
What was waited for the batch goes with the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from narrowgauge.session.tensors.batches import Known, known_by

MOST = 4096  # calls whose batches are remembered


class _Call(NamedTuple):
    given: Known  # empty: whatever comes, it was aside
    seconds: float  # of the time since the last step
    waited: float  # for its batch, before
    late: float  # of that, since the last step: in `seconds` as well
    ours: bool  # of a model that trains
    judged: bool = False  # a loss without gradients came of it
    evaluated: int | None = None  # the model, in evaluation mode


class Aside:
    """Of the time since the last step.

    Attributes:
        waits: takes what was waited for batches that no model was called with yet, in seconds.
        lately: of that, since the last step.
    """

    def __init__(self) -> None:
        self.waits: Callable[[], float] = lambda: 0.0
        self.lately = 0.0
        self._fresh = 0  # the first of the calls since a batch was loaded
        self._calls: list[_Call] = []
        self._began: float | None = None  # a model that does not train was called first since the last loss
        self._given: Known = {}  # to it
        self._late = 0.0  # what was waited for lately, before it
        self._waited = 0.0  # for batches that came with calls, and are trained on

    def called(self, seconds: float, waited: float, given: Known, evaluated: int | None) -> None:
        """A model that trains was called without gradients, and `given` these; which, if it is in evaluation mode."""
        self._add(given, seconds, waited, self.lately, ours=True, evaluated=evaluated)

    def another_called(self, inputs: Any) -> None:
        """A model that does not train is called without gradients, the first one since the last loss or step."""
        self._began, self._given, self._late = time.perf_counter(), known_by(inputs), self.lately

    def judged(self, *, ours: bool) -> None:
        """A loss was computed without gradients, of models that train or of others alone: an evaluation's."""
        if ours:
            self._calls = [call._replace(given={}, judged=True) if call.ours else call for call in self._calls]
        elif self._began is not None:
            self._add(self._given, time.perf_counter() - self._began, self.waits(), self._late, ours=False)
        self._began, self._given = None, {}

    def trained(self, inputs: Any, model: int) -> int:
        """This model is called with gradients: what was called with the same was for this step.

        Returns how many of these calls were a teacher's, in evaluation mode.
        """
        self._began, self._given, self.lately = None, {}, 0.0
        taught = 0
        if any(call.given for call in self._calls):
            now = known_by(inputs).keys()
            self._calls = [
                call._replace(given={}) if call.evaluated == model and call.given.keys() == now else call
                for call in self._calls
            ]
            again = [bool(call.given) and call.given.keys() == now for call in self._calls]
            self._waited += sum(call.waited for call, same in zip(self._calls, again, strict=True) if same)
            taught = sum(same and call.evaluated is not None for call, same in zip(self._calls, again, strict=True))
            self._fresh -= sum(again[: self._fresh])
            self._calls = [call for call, same in zip(self._calls, again, strict=True) if not same]
        return taught

    def loaded(self, seconds: float) -> None:
        """A batch was waited for: the calls before it were with others."""
        self.lately += seconds
        self._fresh = len(self._calls)

    def waited(self, *, loaded: bool) -> float:
        """So long was waited for batches that a model was called with before, and that are trained on now; once.

        If none was `loaded` since, the last one is: targets, say, are computed of other parts of it.
        """
        waited, self._waited = self._waited, 0.0
        for at, call in enumerate(self._calls) if not loaded else ():
            if at >= self._fresh and call.ours and not call.judged:
                waited += call.waited
                self._calls[at] = call._replace(seconds=call.seconds - call.late, waited=0.0, late=0.0)
        return waited

    def taken(self) -> float:
        """The step was made: so many seconds were none of its own."""
        seconds = sum(call.seconds for call in self._calls)
        self._calls.clear()
        self._began, self._given, self.lately, self._fresh = None, {}, 0.0, 0
        return seconds

    def _add(
        self, given: Known, seconds: float, waited: float, lately: float, *, ours: bool, evaluated: int | None = None
    ) -> None:
        late = min(waited, lately)  # what was before the last step was its own
        known = given if len(self._calls) < MOST else {}
        self._calls.append(_Call(known, seconds + late, waited, late, ours, evaluated=evaluated))
        self.lately = 0.0
