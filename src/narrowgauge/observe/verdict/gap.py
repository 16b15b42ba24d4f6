"""The paired loss gap, and the band of chance that it must leave to count.

    gap(v, b)  = 100 * mean_t(v_t - b_t) / mean_t |b_t|        t over the last quarter of the common steps, in %
    band(n, b) = 3.18 * rms over windows of a quarter's length that end in the last half of gap(n, b) in that window

v is a variant's loss, b the baseline's, n the noise twin's (the baseline again, initial weights perturbed by 1e-2).
Pairing step by step removes what the data does to the loss; what is left is the variant's effect and chance. Two runs
of the *same* precision differ by chance alone, and a gap no larger than theirs says nothing about FP8.

One noise twin gives few independent looks at chance: the windows of half a run are worth about three. 3.18 is
Student's t for 95% and three degrees of freedom; with the plain size of the twin's gap as the band, every second
harmless recipe would leave it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowgauge.observe.verdict.types import Outcome

PASS_PCT = 0.25
WATCH_PCT = 1.0
QUARTER = 4
FEWEST_STEPS = 20  # fewer can show that a recipe is broken, never that it is safe
CLEAN_LENGTH = 0.05  # how far a gradient's length may be off the baseline's at the same weights and show no fault
STUDENT_T = 3.18  # 95%, three degrees of freedom
FEW_T = {1: 12.71, 2: 4.30}  # of one look at chance and of two: a program may evaluate no more than once

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """A scalar by step; steps ascend."""

    steps: NDArray[np.int64]
    values: Floats

    def at(self, steps: NDArray[np.int64]) -> Floats:
        """Values at `steps`, all of which must be there."""
        return self.values[np.searchsorted(self.steps, steps)]


@dataclass(frozen=True)
class Gap:
    """A paired gap in percent of the baseline, and the steps that it was taken over."""

    pct: float
    first: int
    last: int


def common(a: Series, b: Series) -> NDArray[np.int64]:
    """The steps at which both have a finite value."""
    finite_a, finite_b = a.steps[np.isfinite(a.values)], b.steps[np.isfinite(b.values)]
    return np.intersect1d(finite_a, finite_b)


def paired_gap(variant: Series, baseline: Series) -> Gap | None:
    """The gap over the last quarter of the common steps; None where there are none."""
    steps = common(variant, baseline)
    if steps.size == 0:
        return None
    window = steps[-max(1, steps.size // QUARTER) :]
    base = baseline.at(window)
    return Gap(relative(variant.at(window) - base, base), int(window[0]), int(window[-1]))


def noise_band(noise: Series, baseline: Series) -> float | None:
    """How large a gap chance alone makes, in percent; None without common steps."""
    steps = common(noise, baseline)
    if steps.size == 0:
        return None
    base = baseline.at(steps)
    difference = noise.at(steps) - base
    length = max(1, steps.size // QUARTER)
    ends = range(max(length, steps.size // 2), steps.size + 1)
    gaps = np.array([relative(difference[e - length : e], base[e - length : e]) for e in ends])
    return STUDENT_T * float(np.sqrt(np.mean(gaps**2)))


def outcome_of(gap_pct: float, band_pct: float | None) -> Outcome:
    """Judge one gap against the band of chance and the limits of 0.25% and 1%.

    A gap inside the band is *inconclusive*, unless the band itself is so narrow that even its edge would pass.
    """
    size = abs(gap_pct)
    if band_pct is not None and size <= band_pct:
        return "pass" if band_pct <= PASS_PCT else "inconclusive"
    if not np.isfinite(gap_pct):
        return "fail"
    if size <= PASS_PCT:
        return "pass"
    return "watch" if size <= WATCH_PCT else "fail"


def relative(difference: Floats, base: Floats) -> float:
    """The mean difference in percent of the base's mean size; of zeros infinite, or 0 if there is none."""
    mean, scale = float(np.mean(difference)), float(np.mean(np.abs(base)))
    if scale:
        return 100.0 * mean / scale
    return mean * np.inf if mean else 0.0
