"""How long a program waits for batches of torch's data loaders: the next step that is trained in the thread has waited.

A batch that an evaluation is called with is none of a step's.
"""

from __future__ import annotations

import threading

from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.steps.ledger import Line
from narrowgauge.session.steps.losses import EvalLosses


class _OfThread(threading.local):
    """What each thread has waited, followed or not."""

    waited = 0.0  # seconds for batches that no model was called with yet


class Loading:
    """Of one session.

    Args:
        hearing, evals: the session's.

    Attributes:
        seen: whether any loader was, where training is followed.
    """

    def __init__(self, hearing: Hearing, evals: EvalLosses) -> None:
        self._hearing, self._evals = hearing, evals
        self._thread = _OfThread()
        self.seen = False

    def batch_loaded(self, seconds: float, *, last: bool = False) -> None:
        """A data loader's iterator gave a batch after so long, or had no more: the one before was the `last`."""
        self._thread.waited += seconds
        if self._hearing.perhaps_mine():
            self.seen = True
            if last:
                self._evals.data_ended()

    def evaluated(self) -> None:
        """A model is called without gradients: what was waited for is no step's."""
        self._thread.waited = 0.0

    def trained(self, line: Line) -> None:
        """A model is called with gradients, in this step."""
        self.seen |= self._thread.waited > 0.0
        if self.seen:
            line.scalars["data_seconds"] = line.scalars.get("data_seconds", 0.0) + self._thread.waited
            self._thread.waited = 0.0
