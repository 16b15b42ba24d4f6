"""Which rows of a run's scalars are steps: an evaluation before the first one has a row, and is none.

A program that trains in turns (a GAN, actor and critic) has steps of each, whose numbers have nothing in common.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.observe.store import Table


def made(scalars: Table) -> NDArray[Any]:
    """Of each row, whether something was trained there: whether it has more than an evaluation's loss, bool [rows]."""
    steps = np.zeros(scalars.rows, dtype=bool)
    for name in scalars.columns:
        if name not in ("step", "eval_loss"):
            steps |= ~np.isnan(np.asarray(scalars[name], dtype=np.float64))
    return steps


def turns(scalars: Table) -> list[NDArray[Any]]:
    """Of each turn of a program that trains in turns its rows, bool [rows]; else one, of all rows.

    In turns: what steps comes again after something else has stepped. Another optimizer for a later stage is no turn.
    """
    everything = np.ones(scalars.rows, dtype=bool)
    if "turn" not in scalars.columns:
        return [everything]
    whose = np.nan_to_num(np.asarray(scalars["turn"], dtype=np.float64))  # steps before the second came have none
    trained = made(scalars)
    order = whose[trained]
    changes = int((order[1:] != order[:-1]).sum())
    found = np.unique(order)
    return [everything] if changes < len(found) else [trained & (whose == turn) for turn in found]
