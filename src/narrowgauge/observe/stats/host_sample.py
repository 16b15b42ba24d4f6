"""What the compiled walk on the CPU takes from a share of the rows, and the bins that SQNR falls into.

    exponents, ranges    as in `metrics.bins`        central moments    n, mean, sum (x - mean)^p for p = 2, 3, 4

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import numpy as np

from narrowgauge.metrics.bins import EXPONENT_BINS, EXPONENT_LOW, RANGE_BINS, RANGE_BLOCK, SQNR_LOW, SQNR_WIDTH
from narrowgauge.observe.stats.host_bits import BIAS, DIGITS, MAGNITUDE, NONE, Array, Number, as_bits, compiled, load

WAYS = 4


@compiled
def sample(
    x_at: Number, shift: int, M: int, K: int, stride: int, first: int, every: int, central: Array, exponents: Array,
    ranges: Array,
) -> None:  # fmt: skip
    """What is taken from every `every`-th row of finite numbers: central moments, exponents and block ranges.

    Args:
        x_at, shift, M, K, stride: as for `operand`.
        first, every: which rows.
        central: [5] float64 out: n, mean and the sums of (x - mean)^p for p = 2, 3, 4.
        exponents, ranges: float64 in and out, counts as in `metrics.bins`, to be added to.
    """
    bits = np.empty(K, np.int32)
    x = bits.view(np.float32)
    n = total = 0.0
    for i in range(first, M, every):
        load(x_at, shift, i * stride, bits)
        n += K
        for j in range(K):
            total += np.float64(x[j])
    mean = total / n if n else 0.0
    m2 = m3 = m4 = 0.0
    places = np.empty(K, np.int32)
    # Several counters for every bin: one that was just written is not there to be read again at once.
    tallies, range_tallies = np.zeros(WAYS * EXPONENT_BINS, np.int32), np.zeros(WAYS * (RANGE_BINS + 1), np.int32)
    for i in range(first, M, every):
        load(x_at, shift, i * stride, bits)
        for j in range(K):
            p = np.float64(x[j]) - mean
            m2 += p * p
            m3 += p * p * p
            m4 += p * p * p * p
        for j in range(K):
            bits[j] &= MAGNITUDE
            binade = (bits[j] >> DIGITS) - np.int32(BIAS + EXPONENT_LOW)
            binade = min(max(binade, np.int32(0)), np.int32(EXPONENT_BINS - 2)) + np.int32(1)
            places[j] = binade if bits[j] else np.int32(0)
        _count_places(places, EXPONENT_BINS, tallies)
        for start in range(0, K, RANGE_BLOCK):
            _place_ranges(x[start : start + RANGE_BLOCK], places[start : start + RANGE_BLOCK])
        _count_places(places, RANGE_BINS + 1, range_tallies)
    for j in range(tallies.size):
        exponents[j % EXPONENT_BINS] += tallies[j]
    for j in range(range_tallies.size):
        if j % (RANGE_BINS + 1) < RANGE_BINS:
            ranges[j % (RANGE_BINS + 1)] += range_tallies[j]
    central[0], central[1], central[2], central[3], central[4] = n, mean, m2, m3, m4


@compiled
def _count_places(places: Array, width: int, tallies: Array) -> None:
    for j in range(places.size):
        tallies[(j & (WAYS - 1)) * width + places[j]] += np.int32(1)


@compiled
def _place_ranges(block: Array, places: Array) -> None:
    """Bins of floor(log2(amax / |x|)) in a run of up to 128 columns; RANGE_BINS for zeros, which have no range.

    The ratio is rounded to float32; where it is infinite, or NaN, x is a zero.
    """
    amax = NONE
    for j in range(block.size):
        amax = max(amax, block[j])
    for j in range(block.size):
        binade = ((as_bits(amax / block[j]) & MAGNITUDE) >> DIGITS) - np.int32(BIAS)
        near = min(binade, np.int32(RANGE_BINS - 1))
        places[j] = near if binade <= np.int32(BIAS) else np.int32(RANGE_BINS)


@compiled
def count_sqnr(signal: Number, error: Number, bins: Array) -> None:
    """Count 10 log10(signal / error) of one row or column; without either it says nothing."""
    if error > 0.0 and signal > 0.0:
        place = np.floor((10 * np.log10(signal / error) - SQNR_LOW) / SQNR_WIDTH) + 1
        bins[int(min(max(place, 0.0), bins.size - 1.0))] += 1
    elif signal > 0.0:
        bins[bins.size - 1] += 1
    elif error > 0.0:
        bins[0] += 1
