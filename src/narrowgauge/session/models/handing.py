"""A training that moves from thread to thread: how far the one that is followed has come, and what it leaves behind."""

from __future__ import annotations

from narrowgauge.session.models.calls import Calls
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.updates import Updates


class Handing:
    """Of one session: its calls, steps and updates."""

    def __init__(self, calls: Calls, steps: Steps, updates: Updates) -> None:
        self._calls, self._steps, self._updates = calls, steps, updates

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return self._steps.ledger.steps

    def proven(self, turn_began: int) -> bool:
        """Whether the thread that is followed has made a step since so many were made."""
        return self.steps > turn_began

    def between_steps(self, turn_began: int) -> bool:
        """Whether it has begun nothing that it has yet to end."""
        if self._calls.training or self._updates.in_closure:
            return False
        return self._steps.between(proven=self.proven(turn_began))

    def only_looked(self, turn_began: int) -> bool:
        """Whether it has made no step since, and called no backward: it may evaluate, with gradients on."""
        return not (self.proven(turn_began) or self._updates.in_closure) and self._steps.between(proven=False)

    def drop(self) -> None:
        """What it has begun is no step, and leaves nothing."""
        self._steps.drop()

    def doubt(self) -> None:
        """What it has begun may be no step: the next forward begins anew."""
        self._steps.doubt()

    def hand_over(self) -> int:
        """Forget what it was about, for another thread goes on; returns how many steps were made."""
        self._calls.hand_over()
        self._updates.hand_over()
        self._steps.hand_over()
        return self.steps
