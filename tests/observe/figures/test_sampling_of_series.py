"""Down-sampling keeps what a reader looks for; the running mean and the paired gap are what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from narrowgauge.observe.figures.sampling import keep_extrema, paired_gap_pct, running_mean, smoothing_window
from narrowgauge.observe.verdict.gap import Series, paired_gap

SERIES = arrays.arrays(np.float64, st.integers(1, 400), elements=st.floats(-1e6, 1e6))


@given(SERIES, st.integers(6, 60))
def test_extrema_and_ends_survive(values: np.ndarray, points: int):
    steps = np.arange(len(values), dtype=float)
    kept_steps, kept = keep_extrema(steps, values, points)
    assert kept.max() == values.max()
    assert kept.min() == values.min()
    assert kept_steps[0] == 0
    assert kept_steps[-1] == len(values) - 1
    assert (np.diff(kept_steps) > 0).all()
    assert np.array_equal(values[kept_steps.astype(int)], kept)
    assert len(kept) <= max(points, 2) + 2


def test_a_one_step_spike_among_a_hundred_thousand_survives():
    values = np.zeros(100_000)
    values[54_321] = 9.0
    steps, kept = keep_extrema(np.arange(100_000.0), values)
    assert 54_321 in steps
    assert kept.max() == 9.0
    assert len(kept) < 1700


def test_a_gap_remains_a_gap():
    values = np.ones(10_000)
    values[5000] = np.nan
    _, kept = keep_extrema(np.arange(10_000.0), values, 100)
    assert np.isnan(kept).sum() == 1


def test_running_mean_by_hand():
    values = np.array([4.0, 1.0, np.nan, 3.0, 5.0])
    # windows: [4] (start), [4 1], itself not finite, [3 5], [3 5] (cut at the end)
    assert np.array_equal(running_mean(values, 3), [4.0, 2.5, np.nan, 4.0, 4.0], equal_nan=True)


@given(SERIES)
def test_a_window_of_one_changes_nothing(values: np.ndarray):
    assert running_mean(values, 1) == pytest.approx(values, abs=1e-4)


def test_the_window_is_odd_and_grows():
    assert [smoothing_window(n) for n in (0, 1, 300, 10**6)] == [1, 1, 11, 1001]


def test_the_gap_pairs_by_step_and_is_in_percent_of_the_baseline():
    steps, gap = paired_gap_pct(
        np.array([1.0, 2, 3, 4]), np.array([2.0, 2, 2, np.nan]), np.array([2.0, 3, 4]), np.array([2.02, 1.98, 5.0]), 1
    )
    assert steps.tolist() == [2, 3, 4]
    assert gap[:2] == pytest.approx([1.0, -1.0])
    assert np.isnan(gap[2])


def test_the_gap_of_a_loss_around_zero_is_the_verdict_s():
    """A window's mean may be next to nothing where its numbers are not."""
    steps, base = np.arange(1.0, 13.0), np.array([1.0, -1.0, 1.001] * 4)
    _, gap = paired_gap_pct(steps, base, steps, base + 0.01, 3)
    assert gap[1:-1] == pytest.approx([paired_gap(Series(steps, base + 0.01), Series(steps, base)).pct] * 10)
