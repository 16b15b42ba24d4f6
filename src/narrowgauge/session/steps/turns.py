"""Which optimizers make a step: programs that train in turns (a GAN, actor and critic) have steps of each.

trainer   0, 1, ...   an optimizer, whatever parameters it holds now: one that trains block by block is one. An
                      optimizer made anew for the same parameters is the same trainer, two of others are two
turn      0, 1, ...   the trainers that step together, in the order in which they first did

Models that are trained one after another have a number each; whether a turn comes again is for the reader to see. A
number is never given twice, though ids of what was freed are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from weakref import ReferenceType, ref

from torch.optim.optimizer import Optimizer

from narrowgauge.session.steps.trained import parameters
from narrowgauge.session.tensors.weakly import Weak, weakly

MOST = 16  # programs that make their optimizers anew, of new parameters, have ever more


def held(optimizer: Optimizer) -> tuple[int, ...]:
    """An optimizer with what it holds now, which may be a group, or a part of one, of what it trains."""
    return (id(optimizer), *[id(group["params"][0]) for group in optimizer.param_groups if group["params"]])


class Turns:
    """The optimizers that have made a step, and which of them did together."""

    def __init__(self) -> None:
        self._trainers: dict[int, tuple[ReferenceType[Optimizer], int]] = {}  # by the optimizer's id
        self._of: dict[frozenset[int], tuple[Weak, int]] = {}  # by its parameters' ids: one of them
        self._count, self._room = count(), 64
        self._seen: dict[frozenset[int], int] = {}

    def trainer(self, optimizer: Optimizer) -> int:
        """The number of an optimizer that steps."""
        known = self._trainers.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        trained = parameters(optimizer)
        ids = frozenset(map(id, trained))
        before = self._of.get(ids)
        number = next(self._count) if before is None or before[0]() is None else before[1]
        self._forget()
        self._trainers[id(optimizer)] = ref(optimizer), number
        if trained:
            self._of[ids] = weakly(trained[0]), number
        return number

    def _forget(self) -> None:
        """Forget what was freed, whenever there may be as much of it as of what lives."""
        if len(self._trainers) + len(self._of) >= self._room:
            self._trainers = {at: known for at, known in self._trainers.items() if known[0]() is not None}
            self._of = {ids: known for ids, known in self._of.items() if known[0]() is not None}
            self._room = 64 + 2 * (len(self._trainers) + len(self._of))

    def of(self, trainers: Iterable[int]) -> int | None:
        """The number of a step's turn; None while all steps were alike, where nothing stepped and beyond `MOST`."""
        together = frozenset(trainers)
        if not together:
            return None
        if together not in self._seen and len(self._seen) < MOST:
            self._seen[together] = len(self._seen)
        return self._seen.get(together) if len(self._seen) > 1 else None
