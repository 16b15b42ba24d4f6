"""Fixed bins: histograms that merge by addition, and the percentiles read from them.

    exponents     bin 0: zeros;  bin i: floor(log2|x|) = i - 97, the first and the last take what lies beyond
    block range   bin i: floor(log2(amax of the 1x128 block / |x|)) = i, the last is open; zeros are left out
    SQNR          bin 0: below -40 dB;  bin i: [-40 + (i - 1)/2, -40 + i/2) dB;  last bin: 80 dB and more

A percentile of two ranks' rows can't be had from their two percentiles, but to the width of a bin it can be had
from the sum of their histograms. Bins must therefore never move: they are part of the stored format.

The sum of an exponent histogram is the number of finite elements that it was taken from: a sampled one states its
share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

EXPONENT_BINS = 128
EXPONENT_LOW = -96  # binade of bin 1; bin 127 is 2^30 and above
RANGE_BINS = 40
RANGE_BLOCK = 128  # elements of a row that share one amax
SQNR_BINS = 242
SQNR_LOW = -40.0
SQNR_HIGH = 80.0
SQNR_WIDTH = 0.5


def exponent_bin(x: Array) -> Array:
    """Bin of every finite element of `x`, by its binade in float64; same shape, int64."""
    _, exponent = np.frexp(np.abs(x))  # |x| = f * 2^exponent with f in [0.5, 1)
    binade = np.clip(exponent - 1, EXPONENT_LOW, EXPONENT_LOW + EXPONENT_BINS - 2)
    return np.where(x == 0, 0, binade - EXPONENT_LOW + 1)


def exponent_of_bin() -> Array:
    """The binade that each bin of an exponent histogram counts, [EXPONENT_BINS]; NaN for bin 0, the zeros.

    Bin i counts 2^e <= |x| < 2^(e+1) with e the i-th value returned.
    """
    binades = np.arange(EXPONENT_BINS, dtype=np.float64) + (EXPONENT_LOW - 1)
    binades[0] = np.nan
    return binades


def sqnr_bin(decibel: Array) -> Array:
    """Bin of every SQNR in dB; +inf (no error at all) is the last bin, -inf the first. NaN is not allowed."""
    position = np.floor((decibel - SQNR_LOW) / SQNR_WIDTH) + 1
    return np.asarray(np.clip(position, 0, SQNR_BINS - 1), dtype=np.int64)


def sqnr_percentile(counts: Array, percent: float) -> Array:
    """The `percent`-th percentile of an SQNR histogram, in dB, interpolated inside its bin.

    Args:
        counts: [..., SQNR_BINS], how many rows (or columns) fell into each bin.
        percent: 0 to 100.

    Returns:
        [...] float64; NaN where nothing was counted. The first bin reads -inf and the last +inf.
    """
    total = counts.sum(-1)
    cumulative = np.cumsum(counts, -1)
    target = total * (percent / 100)
    # The bin in which the running count first reaches the target; at least one row must lie in it.
    reached = (cumulative >= target[..., None]) & (cumulative > 0)
    index = np.argmax(reached, -1)
    inside = np.take_along_axis(counts, index[..., None], -1)[..., 0]
    before = np.take_along_axis(cumulative, index[..., None], -1)[..., 0] - inside
    fraction = np.divide(target - before, inside, out=np.zeros_like(target), where=inside > 0)
    value = SQNR_LOW + SQNR_WIDTH * (index - 1 + np.clip(fraction, 0, 1))
    value = np.where(index == 0, -np.inf, np.where(index == SQNR_BINS - 1, np.inf, value))
    return np.asarray(np.where(total > 0, value, np.nan))


def histogram(bins: Array, count: int) -> Array:
    """Counts per bin, [count] float64."""
    return np.bincount(bins.reshape(-1), minlength=count).astype(np.float64)
