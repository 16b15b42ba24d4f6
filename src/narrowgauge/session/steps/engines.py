"""Steps that an engine makes, DeepSpeed's or an optimizer of Megatron-Core's: each is one, over when the engine's is.

    optimizers step in it      one or several, each once, or once for each of its groups, or of their parts
    none does, and it skipped  all that it holds
    none does                  no step
    one engine in another's    a part of that one's
    all in it are others'      of models beside the one that is watched: no step, and its norm is none of its

While the program is left alone nothing is done as its optimizers step but to note which did, and by which rates: what
one of them holds meanwhile may be a group of what it trains, and what is expected is the engine's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Protocol
from weakref import ReferenceType

from torch import Tensor
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import NO_TASK, backward_task
from narrowgauge.session.doors.hearing import Hearing, heard
from narrowgauge.session.doors.updating import Told
from narrowgauge.session.steps.closures import Closures
from narrowgauge.session.steps.looking import learning_rates
from narrowgauge.session.steps.steps import Steps

_NOTHING: Told = None, False, ()


class Followed(Protocol):
    """How far the program has come, whether it is left alone or not."""

    stepping: ReferenceType[Optimizer] | None
    ended: int
    prepares: int
    closures: Closures
    follows: Callable[[Optimizer], bool]

    def skipped(self, *optimizers: Optimizer) -> None:
        """A step of these that is not left alone was skipped."""

    def forget_clips_of_others(self) -> None:
        """An engine of other models stepped: what was clipped by nobody knows whom was theirs."""


class EngineSteps:
    """Those of one program.

    Args:
        steps, hearing: the session's.
        updates: who follows its optimizers.

    Attributes:
        alone: one runs that is left alone, as steps of engines were expected.
        by: who has stepped in it, or was skipped, by their ids, the latest last.
    """

    def __init__(self, steps: Steps, hearing: Hearing, updates: Followed) -> None:
        self._steps, self.hearing, self._updates = steps, hearing, updates
        self._threads: set[int] = set()  # that are in one
        self._mine = 0  # the thread whose is heard
        self._first = False  # nothing had stepped in the open step as this one began
        self._skips = False  # a gradient scaler skipped something in it
        self.alone = False
        self.by: dict[int, Optimizer] = {}

    def begins(self) -> bool:
        """An engine begins a step; whether its end is to be told: not of one in another's."""
        ident = get_ident()
        if ident in self._threads:
            return False
        self._threads.add(ident)
        self._begun(ident)
        return True

    def stepped(self, told: Callable[[], Told]) -> None:
        """It stepped, or skipped, as it is `told` then."""
        self._threads.discard(get_ident())
        self.engine_stepped(told)
        self._over()

    def failed(self) -> None:
        """It raised; what has stepped in it has."""
        self._threads.discard(get_ident())
        self._raised()
        self._over()

    def forget(self) -> None:
        """Another thread is followed from now on."""
        self.alone, self._mine, self.by = False, 0, {}

    def noted(self, optimizer: Optimizer) -> bool:
        """An optimizer stepped while one is left alone; whether that is a part of it."""
        if self.hearing.ident != get_ident() or backward_task() != NO_TASK:
            return False
        updates = self._updates
        if updates.prepares or not updates.follows(optimizer):
            return True
        updates.ended += 1
        if updates.stepping is None or updates.stepping() in (None, optimizer):
            updates.stepping, updates.closures.again = None, False
            self._note(optimizer)
        return True

    def skipped(self, optimizer: Optimizer) -> None:
        """A gradient scaler skips this one while one is left alone."""
        if (line := self._steps.rest.line) is not None:
            learning_rates(line, optimizer)  # which a schedule may change before it is over
        self._skips = True
        self._note(optimizer)

    @heard
    def _begun(self, ident: int) -> None:
        self._steps.usual.interrupted()
        rest = self._steps.rest
        self._mine, self.by, self._skips = ident, {}, False
        self.alone = rest.on and rest.by_engine
        self._first = not rest.on and not self._steps.made

    @heard
    def engine_stepped(self, told: Callable[[], Told]) -> None:
        """Its step is over; its norm is that of all ranks' gradients."""
        rest, found = self._steps.rest, _NOTHING
        try:
            found = told()
        finally:  # whatever an engine does not tell, its step was made
            _, skipped, optimizers = found
            if optimizers and not (self.by or any(map(self._updates.follows, optimizers))):
                self._updates.forget_clips_of_others()
            elif self.alone:
                self._made_alone(skipped, optimizers)
            elif rest.on:
                if skipped and rest.called:
                    self._left_alone(optimizers, skipped=True)
            else:
                if skipped and not self._steps.made:
                    self._updates.skipped(*optimizers)
                self._made(found[0])

    @heard
    def _raised(self) -> None:
        if self.alone:
            self._made_alone(False, ())

    def _made(self, norm: float | Tensor | None) -> None:
        line = self._steps.ledger.line
        if line is None:
            return
        if norm is not None:
            line.norm = norm.detach().clone() if isinstance(norm, Tensor) else norm
        self._steps.rest.cycle.engine_made(line, all_of_it=self._first)

    def _made_alone(self, skipped: bool, optimizers: Iterable[Optimizer]) -> None:
        """What has stepped in it made a step; if nothing has and it is `skipped`, these were to."""
        skipped = self._skips or (skipped and not self.by)
        made = [*self.by.values()] or ([*optimizers] if skipped else [])
        self.alone, self.by = False, {}
        self._updates.stepping = None
        self._left_alone(made, skipped=skipped)

    def _left_alone(self, optimizers: Iterable[Optimizer], *, skipped: bool) -> None:
        for optimizer in optimizers:
            if self._steps.rest.on:
                self._steps.left_alone(optimizer, skipped=skipped)
            else:  # since the one before, which was not to be expected
                self._steps.ledger.took_part(optimizer)

    def _note(self, optimizer: Optimizer) -> None:
        self.by.pop(id(optimizer), None)
        self.by[id(optimizer)] = optimizer

    def _over(self) -> None:
        if self._mine == get_ident():
            self.forget()
