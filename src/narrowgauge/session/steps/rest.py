"""Steps that are left alone, where the settings ask for it: those between the recorded ones.

    step    8   9  10  11  12 ... 18  19  20  21      every = 10, scalars = "recorded"
    row         x   R   x              x   R   x      R: with tensors

Of such a step no more is heard than that a model was called with gradients, or backward was, and that the optimizer has
stepped since: one look at a flag in each function of ours that a program passes. So it has neither a loss nor a norm.
Evaluations are heard as ever. A program that goes on otherwise than in the two steps before (with another optimizer,
by a graph) has a row of each step from there on; but none of one that had begun, of which a part was not heard.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ReferenceType, ref

from torch.optim.optimizer import Optimizer

from narrowgauge.session.steps.line import Line

AROUND = 1  # steps before a recorded one, and behind it, that have a row


class Rest:
    """Whether the program is left alone now.

    Args:
        asked: whether it is to be, wherever that can be.

    Attributes:
        on: it is, until its steps are `over`.
        called: in the step that it makes a model was called with gradients, or backward was called.
        steps: that were left alone so far.
        until: the last step that is left alone; None if nothing ends it but the program.
        refused: why it is not to be, asked before it is; "" if it may.
    """

    def __init__(self, *, asked: bool) -> None:
        self.asked, self.on = asked, False
        self.refused: Callable[[], str] = lambda: ""
        self.called = False
        self.steps = 0
        self._leader: ReferenceType[Optimizer] | None = None
        self.until: int | None = None
        self._given_up = ""
        self._unlike = False  # a step was not as the one before

    def follows(self, line: Line, *, called: bool, before: set[int]) -> bool:
        """Whether a step of this line may be the last with a row: `called` in it was a model, and the same optimizer
        made it as the one `before`, alone and as a whole."""
        alone = len(line.optimizers) == len(line.stepped) == 1 and line.optimizers == before
        regular = called and line.microbatches > 0 and alone
        self._unlike |= bool(before) and not regular
        led = (leader := self.leader) is not None and id(leader) in line.optimizers
        return not self.on and not line.recorded and regular and led

    def begin(self, step: int, due: int | None) -> bool:
        """Leave the program alone, which begins the next step; False if a recorded one is `due` soon."""
        self.until = None if due is None else due - 1 - AROUND
        if self.until is not None and self.until <= step:
            return False
        if why := self.refused():
            self.give_up(why)
            return False
        self.called = self.on = True
        return True

    def led_by(self, optimizer: Optimizer) -> None:
        """This one made a step that has a row."""
        self._leader = ref(optimizer)

    @property
    def leader(self) -> Optimizer | None:
        """The one that made the steps before, if it lives."""
        return None if self._leader is None else self._leader()

    def end_soon(self) -> None:
        """The step that has begun is the last one that is left alone."""
        self.until = 0

    def over(self, steps: int) -> bool:
        """Whether, so many being made, the next has a row."""
        return self.until is not None and steps >= self.until

    def give_up(self, why: str) -> None:
        """From now on each step has a row."""
        if self.asked:
            self.asked, self._given_up = False, why

    def notes(self, steps: int) -> list[str]:
        """How many of all steps were left alone, and why not more."""
        notes = []
        if self.steps:
            notes.append(
                f"{self.steps} of {steps} steps were left alone, as watch.scalars asks: they have no row, and what was "
                "not finite or skipped in them is not counted."
            )
        why = self._given_up
        if self.asked and self._unlike and not self.steps:
            why = "the program's steps are not each one step of the same optimizer, behind a model's call"
        if why:
            notes.append(f'watch.scalars is "recorded", but {why}: each step has a row{" since" * bool(self.steps)}.')
        return notes
