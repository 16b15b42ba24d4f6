"""Fewer points that still show every peak: by stretches that keep their extrema; never by stride or chance.

    bin of step s = (s - s_min) // width          width = ceil((s_max - s_min + 1) / bins)

A spike that lasts one step in 100,000 is what a user looks for: every stretch keeps its lowest and highest
value.

Legend: S = sites, T = points or bins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def bin_width(first: int, last: int, bins: int) -> int:
    """Steps per bin such that first..last needs at most `bins` bins; at least 1."""
    return max(1, -(-(last - first + 1) // max(1, bins)))


def keep_extrema(steps: Array, values: Array, max_points: int) -> tuple[Array, Array]:
    """Thin a series [T] without NaN to about `max_points`: of each stretch its minimum and its maximum.

    The first and the last point stay too. Points keep their own steps and exact values.
    """
    if len(steps) <= max(4, max_points):
        return steps, values
    starts = np.linspace(0, len(steps), max(1, (max_points - 2) // 2), endpoint=False).astype(np.int64)
    lengths = np.diff(np.append(starts, len(steps)))
    chosen = [np.array([0, len(steps) - 1])]
    for best in (np.minimum, np.maximum):
        is_best = values == np.repeat(best.reduceat(values, starts), lengths)
        places = np.flatnonzero(is_best)
        _, first = np.unique(np.searchsorted(starts, places, side="right"), return_index=True)
        chosen.append(places[first])
    keep = np.unique(np.concatenate(chosen))
    return steps[keep], values[keep]


def extreme(low_ST: Array, high_ST: Array, mean_ST: Array) -> Array:
    """Of each cell's minimum and maximum [S, T], whichever is farther from the site's median bin mean."""
    finite = np.where(np.isfinite(mean_ST), mean_ST, np.nan)
    usual = np.zeros((len(finite), 1))
    seen = np.isfinite(finite).any(axis=1)
    usual[seen, 0] = np.nanmedian(finite[seen], axis=1)
    return np.where(np.abs(high_ST - usual) >= np.abs(low_ST - usual), high_ST, low_ST)
