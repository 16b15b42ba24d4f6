"""A step that is left alone and is as the one before it: all that there is to be done about that, at its two ends.

Between a program's own operations nothing of ours is in the processor's cache: each function that is called there takes
some three microseconds, whatever it does. So what `Rest`, `EvalLosses` and `Ledger` would each do in turn is done here
at once, for as long as nothing else is heard: no evaluation, no other model, no other optimizer. What they would have
come to is what they have in the end.

    begun, ended       a step that they were told of, as it should be
    begins, made       further ones, that are as that was
    begins: False      something is otherwise: they are told, and this step is looked at as that one was
    over               the next step has a row
"""

from __future__ import annotations

from weakref import ReferenceType, ref

from torch.optim.optimizer import Optimizer

from narrowgauge.session.steps.ledger import Ledger
from narrowgauge.session.steps.losses import EvalLosses
from narrowgauge.session.steps.rest import Rest


class Usual:
    """How the steps that are left alone begin and end.

    Args:
        rest, ledger, evals: the session's.
    """

    def __init__(self, rest: Rest, ledger: Ledger, evals: EvalLosses) -> None:
        self._rest, self._ledger, self._evals = rest, ledger, evals
        self._called: object = None  # the model that was called last with gradients, where `rest` was told
        self._model: object = None  # the same of the steps that are as usual; None: none is
        self._optimizer: ReferenceType[Optimizer] | None = None  # that makes them

    def begun(self, model: object) -> None:
        """This was called with gradients."""
        self._called = model

    def ended(self, optimizer: Optimizer) -> None:
        """A step was as it should be, made by this; those that are as it was are as they should be."""
        self._model, self._optimizer = self._called, ref(optimizer)

    def over(self) -> None:
        """The next step has a row."""
        self._called = self._model = self._optimizer = None

    def begins(self, model: object) -> bool:
        """This is called with gradients: whether that is as usual, and done with."""
        if model is not self._model or not self._evals.idle:
            return False
        self._rest.called = self._evals.fed = True
        return True

    def made(self, optimizer: Optimizer) -> bool:
        """This one stepped: whether that is as usual, and done with."""
        rest, ledger = self._rest, self._ledger
        known, made = self._optimizer, ledger.steps + 1
        if known is None or known() is not optimizer or not (rest.called and self._evals.idle):
            return False
        if rest.until is not None and made >= rest.until:
            return False
        ledger.steps = made
        ledger.rows.pace.passed()
        rest.steps += 1
        rest.called = self._evals.fed = False
        return True
