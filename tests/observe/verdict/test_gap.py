"""The paired gap and the band of chance, on series whose answers are known by hand."""

import numpy as np
import pytest

from narrowgauge.observe.verdict.gap import Series, common, noise_band, outcome_of, paired_gap


def series(values, first=1):
    return Series(np.arange(first, first + len(values)), np.asarray(values, dtype=np.float64))


def test_gap_is_the_mean_difference_over_the_last_quarter_relative_to_the_baseline():
    baseline = series([9.0] * 6 + [2.0, 2.0])
    variant = series([0.0] * 6 + [2.01, 2.03])
    gap = paired_gap(variant, baseline)
    assert gap is not None
    assert gap.pct == pytest.approx(100 * 0.02 / 2.0)
    assert (gap.first, gap.last) == (7, 8)


def test_gap_pairs_by_step_not_by_position():
    baseline = series([1.0, 2.0, 3.0, 4.0])
    variant = series([2.0, 3.0, 4.0], first=2)
    gap = paired_gap(variant, baseline)
    assert gap is not None
    assert gap.pct == 0.0


def test_steps_that_are_not_finite_are_not_common():
    baseline, variant = series([1.0, np.nan, 3.0]), series([1.0, 2.0, np.inf])
    assert common(variant, baseline).tolist() == [1]


def test_no_common_step_has_no_gap_and_no_band():
    assert paired_gap(series([1.0]), series([1.0], first=5)) is None
    assert noise_band(series([1.0]), series([1.0], first=5)) is None


def test_the_band_is_student_s_t_times_the_rms_of_the_last_half_s_windows():
    baseline = series([1.0] * 16)
    assert noise_band(series([0.98] * 16), baseline) == pytest.approx(3.18 * 2.0)
    # Windows of 4 that end at 8 ... 16: means of 0, 1/4, 2/4, 3/4, 1, 3/4, 2/4, 1/4 and 0 times 2%.
    noise = series([1.0] * 8 + [0.98] * 4 + [1.0] * 4)
    rms = 2.0 * np.sqrt((2 * (1 + 4 + 9) / 16 + 1) / 9)
    assert noise_band(noise, baseline) == pytest.approx(3.18 * rms)


def test_a_harmless_change_leaves_the_band_in_about_one_of_twenty_comparisons():
    rng = np.random.default_rng(0)
    left = 0
    for _ in range(400):
        # Losses that drift apart and decorrelate over a quarter of the run, as two trainings do.
        shared, twin, variant = (np.convolve(rng.normal(size=400), np.ones(60) / 60, "valid")[:240] for _ in range(3))
        baseline = series(2.0 + 0.1 * shared)
        gap = paired_gap(series(2.0 + 0.1 * variant), baseline)
        band = noise_band(series(2.0 + 0.1 * twin), baseline)
        left += abs(gap.pct) > band
    assert 0.0 < left / 400 < 0.12


def test_of_a_baseline_that_is_zero_no_gap_is_none():
    baseline = series([1.0] * 12 + [0.0] * 8)
    assert paired_gap(baseline, baseline).pct == 0.0
    assert noise_band(baseline, baseline) == 0.0
    assert paired_gap(series([1.0] * 12 + [-1e-9] * 8), baseline).pct == -np.inf


def test_the_band_ignores_what_came_before_the_last_half_s_windows():
    baseline = series([1.0] * 16)
    noise = series([2.0] * 4 + [1.0] * 12)
    assert noise_band(noise, baseline) == 0.0


@pytest.mark.parametrize(
    ("gap", "band", "expected"),
    [
        (0.1, 0.2, "pass"),  # even the band's edge would pass
        (0.3, 0.5, "inconclusive"),
        (-0.3, 0.5, "inconclusive"),
        (0.2, 0.1, "pass"),
        (0.25, None, "pass"),
        (0.9, 0.5, "watch"),
        (-0.9, 0.5, "watch"),  # a lower loss than the baseline's is no pass either
        (1.0, 0.0, "watch"),
        (1.01, 1.0, "fail"),
        (float("nan"), 0.5, "fail"),
        (float("inf"), 0.5, "fail"),
        (float("inf"), float("inf"), "inconclusive"),  # of a baseline of zeros, which the twin left as well
    ],
)
def test_outcomes(gap, band, expected):
    assert outcome_of(gap, band) == expected
