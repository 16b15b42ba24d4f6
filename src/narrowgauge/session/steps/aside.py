"""Seconds between two steps in which models were called without gradients: no step's, unless it learns of those calls.

    model(x)                          an evaluation, a rollout: no step's
    averaged(x); F.mse_loss(...)      of a model that does not train, to a loss without gradients: an evaluation as well
    y = teacher(x); F.mse_loss(model(x), y)          no loss without gradients came of it: the step's
    model(x); ...; model(x) with gradients           the same batch once more: gradient caching's first pass, the
                                                     probabilities before the update. It is the step's

An evaluation may be on the batch that the next step has (all nodes of a graph): it is told by its loss, or by a model
in evaluation mode. Of a model that does not train the batch alone tells: a teacher's own loss may be looked at, too.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from narrowgauge.session.tensors.batches import Known, known_by

MOST = 4096  # calls whose batches are remembered


class _Call(NamedTuple):
    given: Known  # empty: whatever comes, it was aside
    seconds: float
    ours: bool  # of a model that trains


class Aside:
    """Of the time since the last step."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._began: float | None = None  # a model that does not train was called first since the last loss
        self._given: Known = {}  # to it

    def called(self, seconds: float, given: Known) -> None:
        """A model that trains was called without gradients, and `given` these, if they may come again."""
        self._calls.append(_Call(given if len(self._calls) < MOST else {}, seconds, True))

    def another_called(self, inputs: Any) -> None:
        """A model that does not train is called without gradients, the first one since the last loss or step."""
        self._began, self._given = time.perf_counter(), known_by(inputs)

    def judged(self, *, ours: bool) -> None:
        """A loss was computed without gradients, of models that train or of others alone: an evaluation's."""
        if ours:
            self._calls = [call._replace(given={}) if call.ours else call for call in self._calls]
        elif self._began is not None:
            given = self._given if len(self._calls) < MOST else {}
            self._calls.append(_Call(given, time.perf_counter() - self._began, False))
        self._began, self._given = None, {}

    def trained(self, inputs: Any) -> None:
        """A model is called with gradients: what was called with the same was for this step."""
        self._began, self._given = None, {}
        if any(call.given for call in self._calls):
            now = known_by(inputs).keys()
            self._calls = [call for call in self._calls if not call.given or call.given.keys() != now]

    def taken(self) -> float:
        """The step was made: so many seconds were none of its own."""
        seconds = sum(call.seconds for call in self._calls)
        self._calls.clear()
        self._began, self._given = None, {}
        return seconds
