"""Fewer points, the same picture: down-sampling that keeps extrema, and the running mean.

    running mean    m_t = mean(y_{t-h} .. y_{t+h})         h = (w - 1) / 2; finite values only, NaN where y_t is none
    extrema         per bucket of n/k consecutive points: its first minimum, its first maximum and its first gap (NaN)

A strided or random subset would lose the one-step spike that a reader of a loss curve looks for; extrema cannot. The
running mean is centred: one that looks back only runs beside a falling curve instead of through it. Towards both ends
its window is cut: at the start on both sides alike, so that a steep first descent is not drawn too low.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def keep_extrema(steps: Floats, values: Floats, points: int = 1600) -> tuple[Floats, Floats]:
    """At most about `points` of the (step, value) pairs, [n] and [n], every local extremum of a bucket among them.

    First and last point always stay. A NaN in a bucket stays too, so that a gap in the line remains a gap. Values
    come back in step order; short series come back unchanged.
    """
    n = len(values)
    if n <= points:
        return steps, values
    edges = np.linspace(0, n, max(points // 3, 1) + 1).astype(int)
    keep = {0, n - 1}
    for start, stop in pairwise(edges):
        bucket = values[start:stop]
        gaps = np.isnan(bucket)
        if gaps.any():
            keep.add(start + int(np.argmax(gaps)))
        if not gaps.all():
            keep.add(start + int(np.nanargmin(bucket)))
            keep.add(start + int(np.nanargmax(bucket)))
    index = np.fromiter(sorted(keep), dtype=int)
    return steps[index], values[index]


def running_mean(values: Floats, window: int) -> Floats:
    """The mean of the finite values in the `window` points around each point, [n] -> [n]; NaN where the point is.

    Near the start the window shrinks on both sides alike, so the curve begins at the first value; at the end it is cut.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(len(values))
    half = np.minimum(max(window - 1, 0) // 2, at)
    start, stop = at - half, np.minimum(at + half + 1, len(values))
    count = counts[stop] - counts[start]
    total = sums[stop] - sums[start]
    mean = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    # A step that has no finite value of its own stays a gap, or a diverged run would look healthy for a window.
    return np.where(finite, mean, np.nan)


def smoothing_window(steps: int) -> int:
    """How many steps the running mean of a run of `steps` steps covers: a thirtieth, odd, 1 to 1001."""
    return int(np.clip(round(steps / 30), 1, 1000)) | 1


def paired_gap_pct(
    steps_a: Floats, loss_a: Floats, steps_b: Floats, loss_b: Floats, window: int
) -> tuple[Floats, Floats]:
    """Running mean of the loss gap of run b against baseline a, % of the baseline's running mean, at common steps.

        gap_t = 100 * mean_w(b - a) / mean_w |a|

    Both means cover the same steps, those where both losses are finite; a step where one is not is a gap (NaN).
    """
    common, at_a, at_b = np.intersect1d(steps_a, steps_b, return_indices=True)
    a, b = loss_a[at_a], loss_b[at_b]
    both = np.isfinite(a) & np.isfinite(b)
    base = running_mean(np.where(both, np.abs(a), np.nan), window)
    diff = running_mean(np.where(both, b - a, np.nan), window)
    with np.errstate(divide="ignore", invalid="ignore"):
        return common, np.where(base > 0, 100 * diff / base, np.nan)
