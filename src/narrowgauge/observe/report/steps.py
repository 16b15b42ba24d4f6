"""Which rows of a run's scalars are steps: an evaluation before the first one has a row, and is none."""

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
