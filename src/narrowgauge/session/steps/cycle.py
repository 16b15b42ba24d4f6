"""Who makes a program's steps: always the same optimizers, or several that take turns (a GAN, actor and critic).

    critic, generator, critic, generator          period 2
    critic x 5, generator, critic x 5, generator  period 6
    A x 20, B, B                                  period 1: what was before the first B is over
    critic x 5, generator, critic x 2, generator  out of turn, as once in an epoch: known again WINDOW steps on

Where a program has optimizers that have not stepped yet, more steps are seen first: the generator's turn may come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from weakref import ReferenceType, ref

from torch.optim.optimizer import Optimizer

from narrowgauge.session.steps.line import Line

LONGEST, WINDOW = 16, 32  # steps of a period, and those that it is looked for in
AWAITED = 16  # steps in which the turn of an optimizer that has not stepped yet may come


@dataclass(frozen=True)
class Kind:
    """Steps that the same optimizers make, each as a whole.

    Attributes:
        team: their ids.
        makers: the optimizers, in the order in which they step.
        trainers: their numbers.
        backwards: calls of backward that the latest had.
        counted: of these, all but what an optimizer only tried.
        vectors: of these, those on no number.
        called: a model was called in it (the temperature of an actor is trained without).
        zeroes: gradients were set to zero between two of these calls, or behind the last.
        engine: an engine makes it, in one step of its own, however often each optimizer steps in that.
    """

    team: frozenset[int]
    makers: tuple[ReferenceType[Optimizer], ...]
    trainers: set[int]
    backwards: int
    counted: int
    vectors: int
    called: bool
    zeroes: bool = False
    engine: bool = False

    @property
    def leader(self) -> Optimizer | None:
        """The last of its makers, who ends the step, if it lives."""
        return self.makers[-1]() if self.makers else None

    @property
    def living(self) -> list[Optimizer]:
        """Its makers, as far as they live."""
        return [maker for known in self.makers if (maker := known()) is not None]


class Cycle:
    """The kinds of a program's steps, as they follow each other.

    Attributes:
        kinds: of a period that has begun, the next first; empty where none is known.
        unlike: steps were no such period.
        held: all optimizers that the program holds.
    """

    def __init__(self) -> None:
        self.held: Callable[[], Iterable[Optimizer]] = tuple
        self._makers: dict[int, ReferenceType[Optimizer]] = {}  # by id, in the order in which they stepped
        self._seen: deque[Kind] = deque(maxlen=WINDOW)
        self.kinds: deque[Kind] = deque()
        self.unlike = False
        self._irregular = False  # a step was
        self._engine = 0, 0  # the last step in which one stepped, and how many parts that had by then

    def led_by(self, optimizer: Optimizer) -> None:
        """This one made a step that has a row, or was the last to take part in it."""
        self._makers.pop(id(optimizer), None)
        self._makers[id(optimizer)] = ref(optimizer)

    def engine_made(self, line: Line, *, all_of_it: bool) -> None:
        """An engine stepped in the step of this line, and made `all_of_it` so far."""
        self._engine = line.step, len(line.stepped) if all_of_it else -1

    def seen(self, line: Line, *, called: bool) -> None:
        """The step of this line was made; `called` in it was a model."""
        self._makers = {at: known for at, known in self._makers.items() if known() is not None}
        makers = {at: known for at, known in self._makers.items() if at in line.optimizers}
        engine, parts = self._engine[0] == line.step, self._engine[1]
        whole = len(line.stepped) == (parts if engine else len(line.optimizers))  # each of them
        if not ((line.microbatches or called) and whole and makers and len(makers) == len(line.optimizers)):
            self.unlike |= self._irregular or bool(self._seen)
            self._irregular = True
            self._seen.clear()
            return
        known = frozenset(makers), tuple(makers.values()), line.trainers
        counts = line.backwards, line.backwards - line.tried, line.vectors
        self._seen.append(Kind(*known, *counts, called, line.zeroes, engine))
        self.kinds.clear()

    def begins(self) -> bool:
        """Whether what comes is known from what was seen: then it begins with the first of `kinds`."""
        seen = [(kind.team, kind.engine) for kind in self._seen]
        for period in range(1, min(LONGEST, len(seen) // 2) + 1):
            teams = seen[min(map(seen.index, seen[-period:])) :]
            if len(teams) >= 2 * period and teams[period:] == teams[:-period]:
                kinds = deque([*self._seen][-period:])
                if not any(kind.called for kind in kinds):
                    break
                if len(teams) < AWAITED and self._others(kinds):
                    return False
                self.kinds = kinds
                return True
        self.unlike |= len(seen) > 1
        return False

    def _others(self, kinds: Iterable[Kind]) -> bool:
        """Whether there are optimizers of other parameters."""
        known = {_first(maker) for kind in kinds for maker in kind.living}
        return any(_first(optimizer) not in known for optimizer in self.held())

    def passed(self) -> None:
        """A step of the first of `kinds` was made."""
        self._seen.append(self.kinds[0])
        self.kinds.rotate(-1)

    def came_by(self, team: frozenset[int]) -> bool:
        """These made a step, though it was another's turn; False if they are none of those who take turns."""
        kind = next((kind for kind in self.kinds if kind.team == team and not kind.engine), None)
        if kind is None or len(self.kinds) == 1:
            return False
        self._seen.append(kind)
        return True

    @property
    def zeroes(self) -> bool:
        """Whether gradients are set to zero in the middle of some of these steps."""
        return any(kind.zeroes for kind in self._seen)

    @property
    def latest(self) -> list[Optimizer]:
        """Those that made the last step, as far as they live."""
        return self._seen[-1].living if self._seen else []

    def last_steps(self, step: int) -> dict[int, int]:
        """The last steps of all that take part, by the optimizers' ids, if the last of all was this one."""
        found: dict[int, int] = {}
        for back, kind in enumerate(reversed(self.kinds)):
            for number in kind.team:
                found.setdefault(number, step - back)
        return found

    @property
    def gaps(self) -> dict[int, int]:
        """The most steps from one step of each of them to its next, by their ids."""
        at: dict[int, list[int]] = {}
        for place, kind in enumerate(self.kinds):
            for number in kind.team:
                at.setdefault(number, []).append(place)
        period = len(self.kinds)
        return {
            number: max(after - before for before, after in pairwise([*places, places[0] + period]))
            for number, places in at.items()
        }


def _first(optimizer: Optimizer) -> int:
    """The first of its parameters, by its id; 0 without any."""
    return next((id(p) for group in optimizer.param_groups for p in group["params"]), 0)
