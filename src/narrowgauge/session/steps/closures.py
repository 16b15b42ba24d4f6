"""Closures that optimizers are given: `step(closure)` calls it, once or, to try something (LBFGS), several times.

The step begins with the closure's first call, whose loss and gradients are the step's; what comes afterwards is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.unseen import unseen
from narrowgauge.session.steps.steps import Steps


class Closures:
    """Those of one program.

    Args:
        steps: the session's.
        evaluated: told when an optimizer's closure has returned for the first time in a step.

    Attributes:
        depth: how many are running in each other.
        again: the step's gradients are there, and the optimizer tries others.
    """

    def __init__(self, steps: Steps, evaluated: Callable[[Optimizer], object]) -> None:
        self._steps, self._told = steps, evaluated
        self.depth, self.again = 0, False

    def followed(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """What an optimizer is to call in the place of its closure."""

        @passed_over
        @unseen
        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self.evaluates()
            try:
                return closure(*args, **kwargs)
            finally:
                self.evaluates(optimizer)

        return evaluate

    @partial(passed_over, below=True)
    def evaluates(self, optimizer: Optimizer | None = None) -> None:
        """A closure is called, or it has returned to `optimizer`."""
        if optimizer is None:
            self.depth += 1
            self._steps.paused = self._steps.resting.tries = self.again
            return
        self.depth -= 1
        self._steps.paused = self._steps.resting.tries = False
        if not self.again:
            self.again = True
            self._told(optimizer)
