import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.metrics.bins import (
    EXPONENT_BINS,
    SQNR_BINS,
    SQNR_WIDTH,
    exponent_bin,
    exponent_of_bin,
    histogram,
    sqnr_bin,
    sqnr_percentile,
)


def counts(decibel):
    return histogram(sqnr_bin(np.asarray(decibel, dtype=np.float64)), SQNR_BINS)


@given(st.floats(2.0**-95, 2.0**29.5))
def test_the_bin_of_a_number_is_its_binade(x):
    binade = exponent_of_bin()[exponent_bin(np.array([x]))[0]]
    assert 2.0**binade <= x < 2.0 ** (binade + 1)
    assert exponent_bin(np.array([-x])) == exponent_bin(np.array([x]))


def test_zeros_have_a_bin_of_their_own_and_the_ends_are_open():
    bins = exponent_bin(np.array([0.0, -0.0, 1e-45, 1e-30, 1e38, 2.0**30]))
    assert bins.tolist() == [0, 0, 1, 1, EXPONENT_BINS - 1, EXPONENT_BINS - 1]
    assert np.isnan(exponent_of_bin()[0])


@given(st.lists(st.floats(-39, 79), min_size=1, max_size=400), st.sampled_from([1, 5, 50, 95]))
def test_a_percentile_is_right_to_the_width_of_a_bin(values, percent):
    exact = np.percentile(values, percent, method="inverted_cdf")
    assert sqnr_percentile(counts(values)[None], percent)[0] == pytest.approx(exact, abs=SQNR_WIDTH + 1e-9)


@given(st.lists(st.floats(-50, 90), min_size=1), st.lists(st.floats(-50, 90), min_size=1))
def test_histograms_of_two_parts_add_up_to_that_of_both(a, b):
    assert (counts(a) + counts(b) == counts(a + b)).all()


def test_the_ends_of_the_sqnr_axis_read_as_infinite_and_nothing_as_null():
    low, high, nothing = counts([-60.0]), counts([np.inf, 85.0]), np.zeros(SQNR_BINS)
    assert sqnr_percentile(np.stack([low, high]), 5).tolist() == [-np.inf, np.inf]
    assert np.isnan(sqnr_percentile(nothing[None], 5)[0])
