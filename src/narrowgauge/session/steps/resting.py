"""Steps that are made while the program is left alone (`rest.py`), looked at one by one; and how that ends.

Most are not looked at: see `usual.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.optim.optimizer import Optimizer

from narrowgauge.session.steps.ledger import Ledger
from narrowgauge.session.steps.losses import EvalLosses
from narrowgauge.session.steps.rest import Rest
from narrowgauge.session.steps.usual import Usual


class Resting:
    """Those of one program.

    Args:
        rest, ledger, evals, usual: the session's.
        passed: told as it ends when optimizers that stepped meanwhile did last, and how seldom, by their ids.
        take_evaluation: writes what was evaluated so far.

    Attributes:
        told: called when the program begins to be left alone, and when it is not any more.
        quiet: meanwhile nothing is compiled, which would ask what hooks there are.
        careful: the program sets gradients to zero in mid-step, and what becomes of that is followed; or it may have
            references (`references.py`), which is asked.
        tries: an optimizer does, with its closure, and what is called meanwhile is none of the step's.
        zeroes: it has, since it last began to be left alone or shortly before, wherever that was: in a closure, say.
    """

    def __init__(
        self,
        rest: Rest,
        ledger: Ledger,
        evals: EvalLosses,
        usual: Usual,
        passed: Callable[[Mapping[int, int], Mapping[int, int]], None],
        take_evaluation: Callable[[], None],
    ) -> None:
        self._rest, self._ledger, self._evals, self._usual = rest, ledger, evals, usual
        self._passed, self._take_evaluation = passed, take_evaluation
        self.told: Callable[[bool], None] = lambda rests: None
        self.quiet = self.careful = self.tries = self.zeroes = False
        self._odd: list[list[int]] = []  # who made steps that nobody expected, by ids; all behind the last expected one

    def called(self) -> None:
        """A model is called with gradients, or backward is."""
        if not self._rest.called:
            self._rest.called = True
            self._take_evaluation()

    def made(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        """This optimizer has stepped, or was `skipped`."""
        rest, line = self._rest, self._rest.line
        if rest.takes_part(optimizer):
            if skipped:
                self._ledger.skips(line, optimizer)
            return
        if rest.called and id(optimizer) in rest.parted:  # once more: that was a step, and this is one
            self._written(*rest.parted.values(), usual=False)
            rest.opened(self._ledger.steps + 1)
            rest.parted.clear()
            line = rest.line
        called, before = rest.called, rest.cycle.latest
        usual = called and rest.ends(optimizer) and rest.complete
        if called or any(optimizer is maker for maker in before):
            if line is not None and not rest.is_like(line):
                rest.end_soon()
            if skipped:
                self._ledger.skips(line, optimizer)
            self._written(*rest.parted.values(), optimizer, usual=usual)
            if usual:
                rest.turned()
            rest.opened(self._ledger.steps + 1)
        made = [*rest.parted.values()] if called else before
        rest.called = False
        rest.parted.clear()
        self._evals.stepped()
        if not usual:
            makers = [*made, optimizer]
            if called and rest.forgives(makers):
                self.wake(*makers)
            else:
                self.unlike(*makers)
        elif rest.over(self._ledger.steps):
            self.wake()
        elif len(rest.cycle.kinds) == 1 and not rest.by_engine:
            self._usual.ended(optimizer, line)

    def parted(self) -> None:
        """What comes is of the next step, though not all of those that make each of them stepped in this one."""
        self._rest.called = False
        self.unlike()
        self._evals.stepped()

    def unlike(self, *made: Optimizer) -> None:
        """What the program does is not as before; these optimizers `made` its last step."""
        self._rest.give_up(f"what the program did about step {self._ledger.steps + 1} was not as before")
        self.wake(*made)

    def wake(self, *made: Optimizer, now: bool = False) -> None:
        """The next step has a row (if it has begun the one behind, unless `now`); these optimizers `made` the last."""
        rest = self._rest
        self._usual.over()
        if rest.on and rest.called and not now:
            rest.end_soon()
        elif rest.on:
            if rest.parted:  # not all that make a step have, and no more is heard of it
                made = (*rest.parted.values(),)
                self._written(*made, usual=False)
            rest.on, rest.line = False, None
            rest.parted.clear()
            steps, odd, self._odd = self._ledger.steps, self._odd, []
            last = rest.cycle.last_steps(steps - len(odd))
            for at, who in enumerate(odd, steps - len(odd) + 1):
                last.update(dict.fromkeys(who, at))
            self._passed(last | dict.fromkeys(map(id, made), steps), rest.cycle.gaps)
            self._ledger.heard_again(*(made or rest.cycle.latest))
            self.told(False)

    def _written(self, *optimizers: Optimizer, usual: bool) -> None:
        """These made a step; who makes each of them, if that is as `usual`."""
        if (line := self._rest.line) is not None and not usual:
            line.trainers = {self._ledger.rows.turns.trainer(optimizer) for optimizer in optimizers}
        if not usual:
            self._odd.append([*map(id, optimizers)])
        self._ledger.left_alone(line, optimizers[-1])
        self._rest.steps += 1
