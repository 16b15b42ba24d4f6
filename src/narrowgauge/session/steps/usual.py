"""A step that is left alone and is as the one before it: all that there is to be done about that, at its two ends.

Between a program's own operations nothing of ours is in the processor's cache: each function that is called there takes
some three microseconds, whatever it does. So what `Rest`, `EvalLosses` and `Ledger` would each do in turn is done here
at once, for as long as nothing else is heard: no evaluation, no other model, no other optimizer. What they would have
come to is what they have in the end.

    begun, ended       a step that they were told of, as it should be
    model, made        further ones, that are as that was: whose call (`CallsAlone.passes`) and which step
    made: False        something is otherwise: they are told, and this step is looked at as that one was
    over               the next step has a row
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Protocol
from weakref import ReferenceType, ref

from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.steps.ledger import Ledger
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.losses import EvalLosses
from narrowgauge.session.steps.rest import Rest


class Shorter(Protocol):
    """What takes such steps by fewer functions, as long as it may (`shortcut/`)."""

    def take(self, model: object, optimizer: Optimizer, line: Line | None) -> None:
        """Steps are as usual from here on: this is called in them, and that one makes them, the last of this line."""

    def leave(self) -> None:
        """They need not be: what is known of the step that is made is in its line."""

    @property
    def amid(self) -> bool:
        """Whether it knows of calls of backward that no step was made of yet."""


class Usual:
    """How the steps that are left alone begin and end.

    Args:
        rest, ledger, evals: the session's.

    Attributes:
        model: what is called with gradients in steps that are as usual; None where none is.
        come_by: told which step is next, where other ranks may wait for this one there.
        shorter: takes them by fewer functions.
    """

    def __init__(self, rest: Rest, ledger: Ledger, evals: EvalLosses) -> None:
        self._rest, self._ledger, self._evals = rest, ledger, evals
        self._called: object = None  # the model that was called last with gradients, where `rest` was told
        self.model: object = None
        self.come_by: Callable[[int], None] | None = None
        self.shorter: Shorter | None = None
        self._optimizer: ReferenceType[Optimizer] | None = None  # that makes them

    def begun(self, model: object) -> None:
        """This was called with gradients."""
        self._called = model

    def ended(self, optimizer: Optimizer, line: Line | None) -> None:
        """A step was as it should be, made by this, of this line; those that are as it was are as they should be."""
        self.model, self._optimizer = self._called, ref(optimizer)
        if self.model is not None and self.shorter is not None:
            self.shorter.take(self.model, optimizer, line)

    @partial(passed_over, below=True)
    def interrupted(self, *, amid: bool = False) -> None:
        """Something else asks of the step that is made, or tells of it; or, if backward was called in it (`amid`)."""
        if self.shorter is not None and (not amid or self.shorter.amid):
            self.shorter.leave()

    def look_again(self) -> None:
        """The step that is made is looked at: further ones may be taken by fewer functions again."""
        self._optimizer = None

    def over(self) -> None:
        """The next step has a row."""
        self._called = self.model = self._optimizer = None
        self.interrupted()

    def made(self, optimizer: Optimizer) -> bool:
        """This one stepped: whether that is as usual, and done with."""
        rest, ledger = self._rest, self._ledger
        known, made, line = self._optimizer, ledger.steps + 1, rest.line
        if known is None or not (rest.called and self._evals.idle):
            return False
        if known() is not optimizer:
            part = rest.takes_part(optimizer)
            if part and self.come_by is not None and len(rest.parted) == 1:
                self.come_by(made + 1)
            return part
        if len(rest.parted) != len(rest.team) - 1:
            return False
        if rest.until is not None and made >= rest.until:
            return False
        if line is not None:  # as `Rest.is_like`, in one function
            if line.backwards - line.tried != rest.counted or line.vectors != rest.vectors:
                return False
            if line.loss is None and line.vectors != line.backwards - line.elsewhere:
                return False
            if type(line.loss) is float and not isfinite(line.loss):
                return False
        ledger.steps = made
        rest.steps += 1
        rest.called = self._evals.fed = False
        if rest.parted:
            rest.parted.clear()
        if line is None:
            ledger.rows.pace.passed()
        else:
            ledger.keep(line, optimizer)
            rest.line = Line(made + 1, brief=True, trainers=line.trainers, clips=line.clips)  # as `Rest.opened`
        if self.come_by is not None and len(rest.team) == 1:  # or the first of them came by
            self.come_by(made + 1)
        return True
