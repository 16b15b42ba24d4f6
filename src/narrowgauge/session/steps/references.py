"""Calls of the model without gradients in mid-step, while the program is left alone: a reference's, or an evaluation.

    loss = model(x); model(x) without, before backward     a reference (DPO without the adapters): no evaluation
    loss = model(x); model(z) without, before backward     an evaluation

What the model was given tells which. That is looked at in steps with whole rows, and in others from where a whole row
showed a reference, or such a call had a loss of which nobody knew: its step is the last that is left alone as before.
What is compiled, or sets gradients to zero in mid-step, is not looked at for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narrowgauge.session.steps import zeroed
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.losses import EvalLosses
from narrowgauge.session.steps.rest import REFERS, Rest
from narrowgauge.session.tensors.batches import Batches

MOST_TOLD = 3  # steps in a note


class References:
    """Those of one program.

    Args:
        rest, evals, batches: the session's.
        steps: how many were made.

    Attributes:
        seen: there was one in a step with a whole row.
        asks: what models are given is looked at in steps that are left alone.
        evaluated: the last step that has a loss of an evaluation.
    """

    def __init__(self, rest: Rest, evals: EvalLosses, batches: Batches, steps: Callable[[], int]) -> None:
        self._rest, self._evals, self._batches, self._steps = rest, evals, batches, steps
        self.seen = self.asks = False
        self.evaluated = -1
        self._sure = False  # what is evaluated in mid-step is known to be that, or cannot be
        self._left: set[int] = set()  # steps behind which a loss may have been a reference's
        self._called_at = 0, 0  # step and calls of backward, as a model was called last in a step that is left alone
        evals.unsure = self._left_out

    def rests(self, *, able: bool) -> bool:
        """The program begins to be left alone; returns whether it asks, as far as it is `able` to."""
        rest = self._rest
        self._sure = rest.refers or not rest.keeps
        self.asks = rest.refers and rest.keeps and able
        return self.asks

    def fed(self, line: Line, inputs: Any, model: int, *, tries: bool) -> int:
        """A model, told apart by its number, is called with gradients and these in the step of the line.

        As an optimizer `tries` something that is none of the step's. Returns how many microbatches are thrown away.
        """
        begins, self._called_at = self._called_at[0] != line.step, (line.step, line.backwards)
        if tries:
            return 0
        thrown = zeroed.left(line) if zeroed.given(line, lambda: self._batches.again(inputs)) else 0
        if not self.asks:
            self._batches.came(inputs)
            return thrown
        if begins or thrown:
            self._batches.begin_anew()
        self._batches.met(inputs, model)
        return thrown

    def called(self, step: int, backwards: int, *, waits: bool) -> None:
        """A model was called with gradients in this step, of so many calls of backward; whether it `waits` for one."""
        self._called_at = step, backwards if waits else -1

    def may_be(self, inputs: Any) -> bool:
        """Whether a call without gradients on these is one: backward waits, and they are what trains."""
        rest, line = self._rest, self._rest.line
        if rest.on:
            waits = self.asks and line is not None and self._called_at == (line.step, line.backwards)
        else:
            waits = self._evals.backward_waits
        return waits and self._batches.trains(inputs)

    def came(self) -> None:
        """There was one."""
        self._rest.refers = self.seen = True
        if not self._rest.keeps:
            self._rest.give_up(REFERS)

    @property
    def unsure(self) -> bool:
        """Whether nobody knows what the step was given so far, and so what may be one."""
        return self._rest.on and not self._sure and self._evals.fed

    def _left_out(self, others: bool) -> bool:
        """A loss may be a reference's: from the next row on, which is whole, it is known; whether it is left out.

        A program that evaluates between steps, too, and may have `others` from there, is taken to evaluate by it.
        """
        self._rest.refers = True
        self._rest.end_soon()
        out = not others and self.evaluated < self._steps()
        if out:
            self._left.add(self._steps())
        return out

    @property
    def notes(self) -> list[str]:
        """What evaluations lack, of a program that was not seen to have references."""
        if self.seen or not self._left:
            return []
        steps = ", ".join(str(step) for step in sorted(self._left)[:MOST_TOLD])
        return [
            "A loss was computed without gradients between a call with gradients and the next step (after step "
            f"{steps}) before it was known whether such a loss is of the batch that trains: eval_loss leaves it out. "
            'With watch.scalars = "all" it has it.'
        ]
