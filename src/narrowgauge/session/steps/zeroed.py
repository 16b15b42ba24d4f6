"""Gradients that are set to zero before a step is made of them: whether what they came of is the step's.

model(x), backward, zero_grad, model(x), backward     a second look at the same data (SAM): both losses are the step's
model(x), backward, zero_grad, model(z), backward     other data, as an adversary's: what was before is thrown away
model(x), zero_grad, backward, backward               two losses of one call: both are
model(x), backward, an error, zero_grad, model(x)     the step is tried anew, in smaller pieces say: thrown away, too

Each of a step's `backward` calls is one of its microbatches, or `elsewhere`. So it is of whole rows, and of brief ones
where the whole rows before had gradients set to zero in mid-step: there models' inputs are looked at, too.
"""

from __future__ import annotations

from collections.abc import Callable

from narrowgauge.session.steps.line import Line


def counted(line: Line) -> int:
    """Microbatches of a step so far."""
    return line.backwards - line.elsewhere if line.brief else line.microbatches


def given(line: Line, again: Callable[[], bool]) -> bool:
    """A model is called, with data of its last call `again`, or other: whether what the step has is thrown away."""
    line.other_data = counted(line) > 0 and (line.other_data or not again())
    thrown = line.zeroed and line.other_data
    line.zeroed = False  # with the same data it is a second look at them, as sharpness-aware optimizers take it
    return thrown


def added(line: Line) -> bool:
    """Backward is called; where gradients are set to zero between a model's call and this: whether as above."""
    thrown = line.zeroed and line.other_data
    line.zeroed = line.other_data = False
    return thrown


def failed(line: Line) -> None:
    """A model's call or backward raised: what is called behind zero_grad is no second look, whatever its data."""
    line.other_data = counted(line) > 0


def left(line: Line, but: int = 0) -> int:
    """What the step has so far is thrown away, `but` so many of the latest; returns how many microbatches that are."""
    thrown = counted(line) - but
    line.elsewhere += thrown
    line.vectors = 0
    if line.brief:
        line.loss = None
    return thrown
