"""Which rows of a run's scalars are steps: an evaluation before the first one has a row, and is none.

A program that trains in turns (a GAN, actor and critic) has steps of each, whose numbers have nothing in common.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.observe.store import Run, Table

OTHERS = -1.0  # the turn of steps that have no number, because there are too many


def made(scalars: Table) -> NDArray[Any]:
    """Of each row, whether something was trained there: whether it has more than an evaluation's loss, bool [rows]."""
    steps = np.zeros(scalars.rows, dtype=bool)
    for name in scalars.columns:
        if name not in ("step", "eval_loss"):
            steps |= ~np.isnan(np.asarray(scalars[name], dtype=np.float64))
    return steps


def number(run: Run, scalars: Table) -> int:
    """How many steps a run made. Not all have a row where the program was left alone between recorded ones."""
    numbered = np.asarray(scalars["step"])[made(scalars)]
    return max(int(run.meta.get("steps") or 0), int(numbered.max(initial=0)))


def turns(scalars: Table) -> list[tuple[str, NDArray[Any]]]:
    """Of each turn of a program that trains in turns what it is called and its rows, bool [rows]; else all rows, as "".

    A turn is called by its number in the run's scalars. In turns: what steps comes again after something else has
    stepped. Another optimizer for a later stage is no turn, nor are models that are trained one after another. Where
    some come again, all that do not are one.
    """
    everything = np.ones(scalars.rows, dtype=bool)
    if "turn" not in scalars.columns:
        return [("", everything)]
    trained = made(scalars)
    whose = np.asarray(scalars["turn"], dtype=np.float64)
    unknown = np.isnan(whose)
    before = np.logical_and.accumulate(unknown)  # steps before the second came have none, and are the first's
    whose = np.where(before, 0.0, np.where(unknown, OTHERS, whose))
    order = whose[trained & (whose != OTHERS)]  # a step that an engine skipped has none, either, and parts nothing
    begins = order[np.flatnonzero(np.diff(order, prepend=np.nan))]  # of each stretch of one turn
    again, times = np.unique(begins, return_counts=True)
    again = again[times > 1]
    if not len(again):
        return [("", everything)]
    found = [(f"turn {turn:.0f}", trained & (whose == turn)) for turn in again]
    rest = trained & ~np.isin(whose, again)
    if rest.any():
        found.append(("other turns", rest))
    return sorted(found, key=lambda part: int(part[1].argmax()))
