"""How long a program waits for batches of torch's data loaders: the next step that is trained in the thread has waited.

A batch that an evaluation is called with is none of a step's. A program without such a loader need not wait for
anything: it is told of only if it has another library's, whose batches nobody hears of.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.steps.aside import Aside
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.losses import EvalLosses

OTHERS = ("ffcv", "grain", "nvidia.dali", "torchdata.nodes")  # modules whose loaders are none of torch's


class _OfThread(threading.local):
    """What each thread has waited, followed or not."""

    waited = 0.0  # seconds for batches that no model was called with yet


class Loading:
    """Of one session.

    Args:
        hearing, evals, aside: the session's.

    Attributes:
        seen: whether any loader was, where training is followed.
        alike: steps are made of one batch each, as they were, and nobody tells when they have it.
        of_thread: what the calling thread has `waited` for batches that no model was called with yet, in seconds.
    """

    def __init__(self, hearing: Hearing, evals: EvalLosses, aside: Aside) -> None:
        self._hearing, self._evals, self._aside = hearing, evals, aside
        aside.waits = self.evaluated
        self.of_thread = _OfThread()
        self.seen = self.alike = False

    def batch_loaded(self, seconds: float, iterator: Any, *, last: bool = False) -> None:
        """A data loader's iterator gave a batch after so long, or had no more: the one before was the `last`."""
        if self.alike:
            self.of_thread.waited = 0.0  # for those that were trained on
        self.of_thread.waited += seconds
        if self._hearing.perhaps_mine():
            self.seen = True
            self._aside.loaded(seconds)
            if last:
                self._evals.data_ended(id(iterator))
            else:
                first = getattr(iterator, "_num_yielded", 0) == 1
                data = id(getattr(iterator, "_dataset", None))
                self._evals.data_came(data, id(iterator), first=first)

    def evaluated(self) -> float:
        """A model is called without gradients: what was waited for is no step's, unless that trains on the batch."""
        waited, self.of_thread.waited = self.of_thread.waited, 0.0
        return waited

    def trained(self, line: Line) -> None:
        """A model is called with gradients, in this step."""
        waited = self.evaluated()
        waited += self._aside.waited(loaded=waited > 0.0)
        self.seen |= waited > 0.0
        if self.seen:
            line.scalars["data_seconds"] = line.scalars.get("data_seconds", 0.0) + waited

    @property
    def notes(self) -> list[str]:
        """What is not known of the time for data, where somebody would look for it."""
        loaded = [name for name in OTHERS if name in sys.modules]
        if self.seen or not loaded:
            return []
        return [
            f"How long the program waits for its data is not known: batches of {' and '.join(loaded)} are not heard."
        ]
