"""Steps that are left alone, where the settings say so: those between the recorded ones.

    step         8   9  10  11  12 ... 18  19  20  21      every = 10
    "loss"       b   b   R   b   b       b   b   R   b     R: a whole row, and tensors; b: of loss, rates and time
    "recorded"   -   x   R   x   -       -   x   R   x     x: a whole row; -: none

Of such a step no more is heard than that a model was called with gradients, or backward was, and on which number, and
that the optimizer has stepped since: a few short functions. Evaluations are heard as ever. Where several optimizers
make each step (one of matrices, say, and one of the rest), the last of them ends it; where they take turns, it is known
whose is next (`cycle.py`). A program that goes on otherwise (with another optimizer, by a graph) has a row of each step
from there on, unless it was only another's turn (`Rest.forgives`); but none of one that had begun, of which a part was
not heard.

A loss is what `backward` was called on, before a gradient scaler multiplied it; where it is called on no number, or not
at all, there is none. Behind one that is not finite, or unknown, and where `backward` was called another number of
times than in the last step that was looked at, the next is looked at; what an optimizer tries with its closure does not
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite

from torch.optim.optimizer import Optimizer

from narrowgauge.session.steps import pace
from narrowgauge.session.steps.cycle import WINDOW, Cycle
from narrowgauge.session.steps.line import UNCLIPPED, Line

REFERS = "the program calls its model without gradients on batches that it trains on"
FORGIVEN = 16  # steps out of turn, and one more for each WINDOW of steps that were left alone
AROUND = 1  # steps before a recorded one, and behind it, that have a row where those between have none


class Rest:
    """Whether the program is left alone now.

    Args:
        scalars: what the settings ask for (`watch.scalars`).
        possible: whether the program may be left alone at all.
        short: whether its steps are, on all ranks, where that is what it depends on.
        several: whether there are others; one that has no loss is not left alone then, for the run's is theirs.

    Attributes:
        asked: whether it is to be left alone, wherever that can be.
        keeps: whether the losses, rates and times of steps that are left alone are kept.
        on: it is, until its steps are `over`.
        called: in the step that it makes a model was called with gradients, or backward was called.
        cycle: who makes the steps.
        team: the ids of those who make the next one.
        parted: of these, by their ids, who have stepped, without the last.
        steps: that were left alone so far.
        until: the last step that is left alone; None if nothing ends it but the program.
        refused: why it is not to be, asked before it is; "" if it may.
        line: of the step that is being made, as far as it is kept.
        backwards: calls of backward that the next has.
        counted: of these, all but what an optimizer only tries.
        vectors: of these, those on no number.
        hands_on: a step that will have a row may be given what a model makes in this one, or it is asked anyhow.
        refers: the program calls its model without gradients on batches that wait for their backward, perhaps.
    """

    def __init__(
        self,
        scalars: str,
        *,
        possible: bool = True,
        short: Callable[[], bool] = lambda: True,
        several: Callable[[], bool] = lambda: False,
    ) -> None:
        self.asked, self.keeps, self.on = possible and scalars != "all", scalars != "recorded", False
        self._spares = possible and scalars == "auto"
        self._said = scalars if scalars in ("loss", "recorded") else ""
        self._short: Callable[[], bool] = short if scalars == "auto" else lambda: True
        self._several = several
        self.refused: Callable[[], str] = lambda: ""
        self.called = False
        self.steps = 0
        self.cycle = Cycle()
        self.team: frozenset[int] = frozenset()
        self.parted: dict[int, Optimizer] = {}
        self.until: int | None = None
        self._given_up = ""
        self._out_of_turn = 0  # steps so far
        self._lossless = False  # one that was had no loss that may be kept
        self._regular = False  # the last one was as it has to be before one that is left alone
        self.line: Line | None = None
        self._trainers: set[int] = set()  # who makes these steps
        self.backwards = self.counted = self.vectors = 0
        self.hands_on = self.refers = False

    def follows(self, line: Line, *, called: bool) -> bool:
        """Whether a step of this line may be the last with a row; `called` in it was a model."""
        self.cycle.seen(line, called=called)
        if self.on or (line.recorded and not self.keeps):
            return False
        self._regular = self.cycle.begins() and (not self.keeps or self._known(line))
        return self._regular and self._short()

    def measures(self, step: int) -> bool:
        """Whether all gradients of this step are read for their norm, if it has a whole row and is not recorded.

        That takes up to a hundredth of a step, however long steps are, and so is done while it is not known how long.
        """
        return not (self._spares and step > pace.SETTLED)

    @property
    def able(self) -> bool:
        """Whether the program could be left alone, as far as the last of its steps tells, however long they are."""
        return self.asked and self._regular

    def _known(self, line: Line) -> bool:
        """Whether the loss of a step like this one is what backward is called on; and it may be kept."""
        elsewhere = line.elsewhere if line.zeroes or line.tried else 0
        heard = line.backwards == line.microbatches + elsewhere and has_all(line, line.vectors)
        heard &= not (line.vectors or line.loss is None) or not self._several()
        self._lossless |= not heard
        return heard

    def begin(self, line: Line, due: int | None) -> bool:
        """Leave the program alone, which begins the step behind this one; False if a recorded one is `due` soon."""
        self.until = None if due is None else due - 1 - (0 if self.keeps else AROUND)
        if self.until is not None and self.until <= line.step:
            return False
        if why := self.refused():
            self.give_up(why)
            return False
        self.called = self.on = True
        self._expect()
        self.opened(line.step + 1)
        return True

    def _expect(self) -> None:
        kind = self.cycle.kinds[0]
        self.team, self._trainers = kind.team, kind.trainers
        self.backwards, self.counted, self.vectors = kind.backwards, kind.counted, kind.vectors
        self.parted.clear()

    def turned(self) -> None:
        """A step was made by who was expected to: the next may be others'."""
        if len(self.cycle.kinds) > 1:
            self.cycle.passed()
            self._expect()

    def forgives(self, makers: Iterable[Optimizer]) -> bool:
        """Whether these only made their step out of turn, as a GAN's whose epoch is no multiple of its critic's steps.

        Then the program is left alone again as soon as all that is looked at comes in turns. Not where there are
        several ranks, who have agreed on it.
        """
        if self._several() or self._out_of_turn >= FORGIVEN + self.steps // WINDOW:
            return False
        self._out_of_turn += 1
        return self.cycle.came_by(frozenset(map(id, makers)))

    def opened(self, step: int) -> None:
        """This one is the next; it is left alone."""
        others = len(self.cycle.kinds) - 1
        soon = others > 0 and self.until is not None and step + others > self.until
        self.hands_on = soon or self.refers
        self.line = Line(step, brief=True, trainers=self._trainers, clips=UNCLIPPED) if self.keeps else None

    def is_like(self, line: Line) -> bool:
        """Whether the step of this line, which is made, is as those before: by backward's calls, and a finite loss."""
        loss = line.loss
        if line.backwards - line.tried != self.counted or not has_all(line, self.vectors):
            return False
        return not isinstance(loss, float) or isfinite(loss)

    @property
    def by_engine(self) -> bool:
        """Whether the next step is one that an engine makes."""
        return self.cycle.kinds[0].engine

    @property
    def makers(self) -> list[Optimizer]:
        """Those who make the next step, as far as they live."""
        return self.cycle.kinds[0].living

    def takes_part(self, optimizer: Optimizer) -> bool:
        """This one stepped; whether it is one of several, of which the last is yet to come."""
        number = id(optimizer)
        if not (self.called and number in self.team) or number in self.parted or self.ends(optimizer):
            return False
        self.parted[number] = optimizer
        return True

    def ends(self, optimizer: Optimizer) -> bool:
        """Whether this one is the last of those who make the next step."""
        return optimizer is self.cycle.kinds[0].leader

    def is_first(self, optimizer: Optimizer) -> bool:
        """Whether a step begins with this one's: none has stepped, or this one has before, which was another step."""
        return not self.parted or id(optimizer) in self.parted

    @property
    def complete(self) -> bool:
        """Whether all but the last have stepped."""
        return len(self.parted) == len(self.team) - 1

    def end_soon(self) -> None:
        """The step that has begun is the last one that is left alone."""
        self.until, self.hands_on = 0, self.refers or len(self.cycle.kinds) > 1

    def over(self, steps: int) -> bool:
        """Whether, so many being made, the next has a row."""
        return self.until is not None and steps >= self.until

    def give_up(self, why: str) -> None:
        """From now on each step has a row."""
        if self.asked:
            self.asked, self._given_up = False, why

    def facts(self, merged: int = 0) -> dict[str, int]:
        """How many steps were left alone, by what is kept of them, or are `merged` over ranks of which one was."""
        steps = max(self.steps, merged)
        return {"steps_in_brief" if self.keeps else "steps_left_alone": steps} if steps else {}

    def notes(self, steps: int, merged: int = 0) -> list[str]:
        """How many of all steps were left alone, and why not more; `merged` as above."""
        notes = []
        if self.steps and not self.keeps:
            notes.append(
                f"{self.steps} of {steps} steps were left alone, as watch.scalars asks: they have no row, and what was "
                "not finite or skipped in them is not counted."
            )
        why = self._given_up
        if self.asked and self._lossless and not self.steps:
            why = "backward is called on no number, or on what is thrown away"
        elif self.asked and self.cycle.unlike and not self.steps:
            why = "the program's steps do not come again as they were, by the same optimizers, or call no model"
        if why and self._said:
            whose = " on this rank; the run's are brief where another rank's are" if merged > self.steps else ""
            notes.append(
                f'watch.scalars is "{self._said}", but {why}: each step has a {"whole " * self.keeps}row'
                f"{' since' * bool(self.steps)}{whose}."
            )
        return notes


def has_all(line: Line, vectors: int) -> bool:
    """Whether a step has the loss of all calls of backward that are its own, of which so many were on no number."""
    return line.vectors == vectors and (line.loss is None) is (line.backwards - line.elsewhere == vectors)
