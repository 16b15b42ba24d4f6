"""What the compiled walk on the CPU takes from a share of the rows, and the bins that SQNR falls into.

    exponents, ranges    as in `metrics.bins`        central moments    n, mean, sum (x - mean)^p for p = 2, 3, 4

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import numpy as np

from narrowgauge.metrics.bins import (
    EXPONENT_BINS,
    EXPONENT_LOW,
    RANGE_BINS,
    RANGE_BLOCK,
    SQNR_BINS,
    SQNR_LOW,
    SQNR_WIDTH,
)
from narrowgauge.observe.stats.host_bits import (
    BIAS,
    DIGITS,
    MAGNITUDE,
    Array,
    Number,
    as_bits,
    as_float,
    as_long,
    bits_of,
    compiled,
    widely,
)

WAYS = 4  # counters for every bin: one that was just written is not there to be read again at once
TALLIES = WAYS * (EXPONENT_BINS + RANGE_BINS + 1)

# Where the bins of SQNR begin, as ratios; and for each sixteenth of a binade of ratios, how many begin at or below its
# start. Inside of one, a quarter of a decibel wide, at most one more begins.
EDGES = np.append(10 ** ((SQNR_LOW + SQNR_WIDTH * np.arange(SQNR_BINS - 1)) / 10), np.nan)
PIECE = 52 - 4  # of a float64's bits: the exponent and four digits are left
LOWEST, HIGHEST = (int(edge) >> PIECE for edge in EDGES[[0, -2]].view(np.int64))
NEAR = np.searchsorted(EDGES, (np.arange(LOWEST, HIGHEST + 2) << PIECE).view(np.float64), side="right")
NEAR[0] = 0  # what lies below it is looked for here, too


@compiled
def sample(
    x_at: Number, shift: int, K: int, stride: int, first: int, every: int, count: int, room: Array, tallies: Array,
    central: Array,
) -> None:  # fmt: skip
    """What is taken from `count` rows of finite numbers: central moments, exponents and block ranges.

    Args:
        x_at, shift, K, stride: as for `host_kernel.operand`.
        first, every: which rows.
        room: [3, K] int32, to be used.
        tallies: [TALLIES] int32 in and out, counts as in `metrics.bins`, to be added to.
        central: [5] float64 out: n, mean and the sums of (x - mean)^p for p = 2, 3, 4.
    """
    widely()
    magnitude, places, total, n = room[1, :K], room[2, :K], 0.0, np.float64(count) * K
    for i in range(first, first + count * every, every):
        x = bits_of(x_at, shift, i * stride, K, room[0]).view(np.float32)
        for j in range(K):
            total += np.float64(x[j])
    mean = total / n if count else 0.0
    m2 = m3 = m4 = 0.0
    for i in range(first, first + count * every, every):
        bits = bits_of(x_at, shift, i * stride, K, room[0])
        x = bits.view(np.float32)
        for j in range(K):
            p = np.float64(x[j]) - mean
            m2 += p * p
            m3 += p * p * p
            m4 += p * p * p * p
        for j in range(K):
            size = np.int32(bits[j] & MAGNITUDE)
            binade = np.int32((size >> DIGITS) - np.int32(BIAS + EXPONENT_LOW))
            binade = np.int32(min(max(binade, np.int32(0)), np.int32(EXPONENT_BINS - 2)) + np.int32(1))
            magnitude[j], places[j] = size, binade if size else np.int32(0)
        _count_places(places, EXPONENT_BINS, tallies)
        for start in range(0, K, RANGE_BLOCK):
            end = min(start + RANGE_BLOCK, K)
            _place_ranges(magnitude[start:end], places[start:end])
        _count_places(places, RANGE_BINS + 1, tallies[WAYS * EXPONENT_BINS :])
    central[0], central[1], central[2], central[3], central[4] = n, mean, m2, m3, m4


@compiled
def fold(tallies: Array) -> None:
    """Add what the other ways counted, [TALLIES], to the first."""
    exponents, ranges = tallies[: WAYS * EXPONENT_BINS], tallies[WAYS * EXPONENT_BINS :]
    for way in range(1, WAYS):
        for bins, size in ((exponents, EXPONENT_BINS), (ranges, RANGE_BINS + 1)):
            here = bins[way * size :]
            for j in range(size):
                bins[j] += here[j]


@compiled
def add_tallies(tallies: Array, exponents: Array, ranges: Array) -> None:
    """Add what was counted and folded to histograms."""
    for j in range(EXPONENT_BINS):
        exponents[j] += tallies[j]
    ranges_here = tallies[WAYS * EXPONENT_BINS :]
    for j in range(RANGE_BINS):
        ranges[j] += ranges_here[j]


@compiled
def merge_central(a: Array, b: Array) -> None:
    """Central moments of two sets, n, mean and three sums, into the first: as `metrics` merges them."""
    if not b[0]:
        return
    na, nb = a[0], b[0]
    n, by = na + nb, b[1] - a[1]
    m2, m3, m4 = a[2] + b[2], a[3] + b[3], a[4] + b[4]
    m4 += by * (4.0 * (na * b[3] - nb * a[3]) + 6.0 * by * (na * na * b[2] + nb * nb * a[2]) / n) / n
    m4 += by**4 * na * nb * (na * na - na * nb + nb * nb) / n**3
    m3 += by * (3.0 * (na * b[2] - nb * a[2]) + by * by * na * nb * (na - nb) / n) / n
    m2 += by * by * na * nb / n
    a[0], a[1], a[2], a[3], a[4] = n, a[1] + by * nb / n, m2, m3, m4


@compiled
def _count_places(places: Array, width: int, tallies: Array) -> None:
    for j in range(places.size):
        tallies[np.uint64((j & (WAYS - 1)) * width + places[j])] += np.int32(1)


@compiled
def _place_ranges(magnitude: Array, places: Array) -> None:
    """Bins of floor(log2(amax / |x|)) in a run of up to 128 columns; RANGE_BINS for zeros, which have no range.

    The ratio is rounded to float32; where it is infinite, or NaN, x is a zero. Both are slices from their beginning:
    an index that starts anywhere else might be negative to the compiler, which then vectorizes nothing.
    """
    widely()
    largest = np.int32(0)
    for j in range(magnitude.size):
        largest = max(largest, magnitude[j])
    amax, x = as_float(largest), magnitude.view(np.float32)
    for j in range(magnitude.size):
        binade = np.int32((np.int32(as_bits(amax / x[j]) & MAGNITUDE) >> DIGITS) - np.int32(BIAS))
        near = min(binade, np.int32(RANGE_BINS - 1))
        places[j] = near if binade <= np.int32(BIAS) else np.int32(RANGE_BINS)


@compiled
def sqnr_bin(signal: Number, error: Number) -> int:
    """The bin of 10 log10(signal / error) of one row or column; without either it says nothing, -1.

    It is looked up: a logarithm would cost as much as summing a short row.
    """
    if error > 0.0 and signal > 0.0:
        ratio = signal / error
        piece = (as_long(ratio) >> PIECE) - LOWEST
        near = NEAR[np.uint64(min(max(piece, 0), NEAR.size - 1))]
        place: int = near + (EDGES[np.uint64(near)] <= ratio)
        return place
    if signal > 0.0:
        return SQNR_BINS - 1
    return 0 if error > 0.0 else -1
