"""One walk over a matrix on the CPU, compiled: rows come into the cache once, and everything is counted from there.

    row of x, row of codes  ->  float32 x, d = codes * scale  ->  float64 sums

Loops are branch-free, so that they vectorize. Whether all was finite the sums of squares tell afterwards; a matrix that
was not is given back uncounted, for the passes that take anything.

float64 holds the squares of all float32 numbers and of their products, so nothing is rescaled, and differences of sums
keep more digits than float32 data have:

    mean = s / n        M2 = xx - s^2 / n        dd = ee - xx + 2 xd        s = sum x, xx = sum x^2, ...

Counting with `sum += 1.0 if ... else 0.0` in float32 is exact below 2^24 columns, and ten times faster than in int64.

Legend: M = rows, K = columns, RC = granules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import intrinsic

from narrowgauge.metrics.bins import EXPONENT_BINS, EXPONENT_LOW, RANGE_BINS, RANGE_BLOCK, SQNR_LOW, SQNR_WIDTH

Array = npt.NDArray[Any]
Number = Any  # a machine number of the width that the code says

MAGNITUDE: Number = np.int32(0x7FFFFFFF)
INFINITY: Number = np.int32(0x7F800000)
LARGEST: Number = np.finfo(np.float32).max
BIAS = 127
ONE: Number = np.float32(1)
NONE: Number = np.float32(0)

# What `count_codes` leaves in its sums, in this order; of a result the first seven.
COUNTED = (
    *("nan_count", "inf_count", "amax", "amin", "n", "mean", "m2"),
    *("scaled", "flushed", "saturated", "scaled_xx", "flushed_xx", "compared", "xx", "xd", "dd", "ee"),
)
OWN = 7
_NAN, _INF, _AMAX, _AMIN, _N, _MEAN, _M2 = range(OWN)
_SCALED, _FLUSHED, _SATURATED, _SCALED_XX, _FLUSHED_XX, _COMPARED, _XX, _XD, _DD, _EE = range(OWN, len(COUNTED))
SAMPLED = ("sample_n", "sample_mean", "sample_m2", "sample_m3", "sample_m4")
SCALES = ("scale_n", "scale_mean", "scale_m2", "scale_min", "scale_max")
CHECKED = ("gemm_ww", "gemm_wg", "gemm_gg", "gemm_ee")

# Sums may be taken in any order and multiplications fused; NaN and Inf keep their meaning, and a division is one.
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


def _as_float(typing: Any, bits: Any) -> Any:
    """The float32 that an int32 is the bits of."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), build


as_float: Any = intrinsic(_as_float)


@_compiled
def finite(value: Number) -> bool:
    """Whether a number is one; numba's own test is folded away once additions may be regrouped."""
    return bool(abs(value) < np.inf)


@_compiled
def load(row: Array, shift: int, bits: Array) -> None:
    """A row of float32 bits, or of bfloat16's (shift 16), as float32 bits."""
    for j in range(bits.size):
        bits[j] = np.int32(row[j]) << np.int32(shift)


@_compiled
def extremes(bits: Array) -> tuple[Number, Number]:
    """Bits of the largest magnitude, and of the smallest that is not zero; infinity's without one."""
    largest, smallest = np.int32(0), np.uint32(0xFFFFFFFF)
    for j in range(bits.size):
        magnitude = bits[j] & MAGNITUDE
        largest = max(largest, magnitude)
        smallest = min(smallest, np.uint32(magnitude - np.int32(1)))  # a zero wraps around and is the largest
    return largest, np.int32(smallest) + np.int32(1) if largest else INFINITY


@_compiled
def spread(scales: Array, width: int, scale: Array, inv: Array) -> None:
    """A row of granules, `width` columns each: to every column its scale and the inverse, as `QTensor` has it."""
    for g in range(scales.size):
        value = scales[g]
        inverse = min(ONE / value, LARGEST) if value == value else ONE
        for j in range(g * width, min((g + 1) * width, scale.size)):
            scale[j] = value
            inv[j] = inverse


@_compiled
def count_scales(scale_RC: Array) -> tuple[float, float, float, float, float]:
    """n, mean, M2, minimum and maximum of the scales, all of which are finite."""
    total = m2 = 0.0
    for value in scale_RC.flat:
        total += np.float64(value)
    mean = total / scale_RC.size
    for value in scale_RC.flat:
        m2 += (np.float64(value) - mean) ** 2
    return np.float64(scale_RC.size), mean, m2, np.float64(scale_RC.min()), np.float64(scale_RC.max())


@_compiled
def operand(
    x_MK: Array, shift: int, codes_MK: Array, table: Array, limit: Number, scale_RC: Array, granule: Array,
    shares: Array, places: Array, starts: Array, vector: Array, columns: Array,
) -> bool:  # fmt: skip
    """Everything of an operand into its packed vector; False, and nothing to be used, if not all of it is finite.

    Args:
        x_MK: int32, the bits of float32 numbers, or uint16, those of bfloat16 (shift 16).
        codes_MK: uint8.
        table: [256] float32, what each code means.
        limit: float32, above which |x| * inv_scale is saturated.
        scale_RC: float32, one per granule of `granule` = (rows, columns) elements.
        shares: (first, stride) of the sampled rows, and of those that the sums along columns are over.
        places: where in the vector COUNTED, SAMPLED and SCALES go.
        starts: where in the vector the SQNR of rows, exponents and ranges begin and end, [6].
        vector: [width] float64, neutral; filled.
        columns: [2, K] float64, to which the sums of x^2 and e^2 along columns are added.
    """
    counted, sampled = np.zeros(len(COUNTED)), np.empty(len(SAMPLED))
    rows = np.empty((2, x_MK.shape[0]))
    if not count_codes(
        x_MK, shift, codes_MK, table, limit, scale_RC, granule, shares[2], shares[3], counted, rows, columns
    ):
        return False
    count_sqnr(rows, vector[starts[0] : starts[1]])
    sample(x_MK, shift, shares[0], shares[1], sampled, vector[starts[2] : starts[3]], vector[starts[4] : starts[5]])
    scales = np.array(count_scales(scale_RC))
    for place, value in zip(places, np.concatenate((counted, sampled, scales))):  # noqa: B905, what zip has when compiled
        vector[place] = value
    return True


@_compiled
def count_codes(
    x_MK: Array, shift: int, codes_MK: Array, table: Array, limit: Number, scale_RC: Array, granule: Array,
    first: int, stride: int, sums: Array, rows: Array, columns: Array,
) -> bool:  # fmt: skip
    """Count a matrix and its codes: `sums` as in COUNTED, `rows` [2, M] of x^2 and e^2; the rest as for `operand`."""
    M, K = x_MK.shape
    bits = np.empty(K, np.int32)
    x, d = bits.view(np.float32), np.empty(K, np.float32)
    scale, inv = np.empty(K, np.float32), np.empty(K, np.float32)
    uniform = scale_RC.size == 1
    spread(scale_RC[0], granule[1], scale, inv)
    values = table * scale[0] if uniform else table
    largest, smallest = np.int32(0), INFINITY
    for i in range(M):
        if not uniform and i % granule[0] == 0:
            spread(scale_RC[i // granule[0]], granule[1], scale, inv)
        load(x_MK[i], shift, bits)
        high, low = extremes(bits)
        largest, smallest = max(largest, high), min(smallest, low)
        for j in range(K):
            d[j] = values[codes_MK[i, j]]
        flushed = beyond = NONE
        for j in range(K):
            flushed += ONE if d[j] == NONE else NONE
        if not uniform:
            for j in range(K):
                d[j] = d[j] * scale[j]
        # Rounding is monotone: where the largest is not beyond the limit, none is.
        if not uniform or as_float(high) * inv[0] > limit:
            for j in range(K):
                beyond += ONE if abs(x[j]) * inv[j] > limit else NONE
        s = xx = xd = ee = 0.0
        for j in range(K):
            v, w = np.float64(x[j]), np.float64(d[j])
            e = v - w
            s += v
            xx += v * v
            xd += v * w
            ee += e * e
        if not (xx < np.inf and ee < np.inf):  # something in x, a code or a scale is none
            return False
        sums[_MEAN] += s
        sums[_XX] += xx
        sums[_XD] += xd
        sums[_EE] += ee
        sums[_SATURATED] += beyond
        rows[0, i], rows[1, i] = xx, ee
        if flushed:
            _count_flushed(x, codes_MK[i], sums)
        if i % stride == first:
            for j in range(K):
                v = np.float64(x[j])
                e = v - np.float64(d[j])
                columns[0, j] += v * v
                columns[1, j] += e * e
    xx, n = sums[_XX], np.float64(x_MK.size)
    sums[_DD] = max(0.0, sums[_EE] - xx + 2 * sums[_XD])
    for slot in (_SCALED, _COMPARED):
        sums[slot] = n
    sums[_SCALED_XX] = xx
    _finish(n, xx, largest, smallest, sums)
    return True


@_compiled
def _count_flushed(x: Array, codes: Array, sums: Array) -> None:
    flushed, energy = NONE, 0.0
    for j in range(x.size):
        gone = (codes[j] & 0x7F) == 0 and x[j] != NONE
        v = np.float64(x[j]) if gone else 0.0
        flushed += ONE if gone else NONE
        energy += v * v
    sums[_FLUSHED] += flushed
    sums[_FLUSHED_XX] += energy


@_compiled
def _finish(n: Number, xx: Number, largest: Number, smallest: Number, sums: Array) -> None:
    """Central moments from raw sums, and magnitudes from their bits; the slot of the mean holds the sum."""
    sums[_AMAX], sums[_AMIN], sums[_N] = as_float(largest), as_float(smallest), n
    sums[_MEAN] /= n
    sums[_M2] = max(0.0, xx - n * sums[_MEAN] ** 2)


@_compiled
def result(y_MN: Array, shift: int, places: Array, head: Array) -> bool:
    """A result's own moments, the first of COUNTED, into the head of its packed vector; as `operand` does it."""
    M, N = y_MN.shape
    sums = np.zeros(OWN)
    bits = np.empty(N, np.int32)
    y, energy = bits.view(np.float32), 0.0
    largest, smallest = np.int32(0), INFINITY
    for i in range(M):
        load(y_MN[i], shift, bits)
        high, low = extremes(bits)
        largest, smallest = max(largest, high), min(smallest, low)
        s = yy = 0.0
        for j in range(N):
            v = np.float64(y[j])
            s += v
            yy += v * v
        sums[_MEAN] += s
        energy += yy
    if not energy < np.inf:
        return False
    _finish(np.float64(y_MN.size), energy, largest, smallest, sums)
    for place, value in zip(places[:OWN], sums):  # noqa: B905, what zip has when compiled
        head[place] = value
    return True


@_compiled
def sample(x_MK: Array, shift: int, first: int, stride: int, central: Array, exponents: Array, ranges: Array) -> None:
    """What is taken from every `stride`-th row of finite numbers: central moments, exponents and block ranges.

    Args:
        x_MK, shift: as for `operand`.
        central: [5] float64 out: n, mean and the sums of (x - mean)^p for p = 2, 3, 4.
        exponents, ranges: float64 in and out, counts as in `metrics.bins`, to be added to.
    """
    M, K = x_MK.shape
    bits = np.empty(K, np.int32)
    x = bits.view(np.float32)
    n = total = 0.0
    for i in range(first, M, stride):
        load(x_MK[i], shift, bits)
        n += K
        for j in range(K):
            total += np.float64(x[j])
    mean = total / n if n else 0.0
    m2 = m3 = m4 = 0.0
    for i in range(first, M, stride):
        load(x_MK[i], shift, bits)
        for j in range(K):
            p = np.float64(x[j]) - mean
            m2 += p * p
            m3 += p * p * p
            m4 += p * p * p * p
        for j in range(K):
            magnitude = bits[j] & MAGNITUDE
            binade = (magnitude >> 23) - BIAS - EXPONENT_LOW
            exponents[min(max(binade, 0), EXPONENT_BINS - 2) + 1 if magnitude else 0] += 1
            bits[j] = magnitude
        _count_ranges(x, ranges)
    central[0], central[1], central[2], central[3], central[4] = n, mean, m2, m3, m4


@_compiled
def _count_ranges(magnitudes: Array, ranges: Array) -> None:
    """Counts of floor(log2(block amax / |x|)) over runs of 128 columns; the ratio is rounded to float32."""
    ratio = np.empty(RANGE_BLOCK, np.float32)
    fields = ratio.view(np.int32)
    for start in range(0, magnitudes.size, RANGE_BLOCK):
        block = magnitudes[start : start + RANGE_BLOCK]
        amax = NONE
        for j in range(block.size):
            amax = max(amax, block[j])
        for j in range(block.size):
            ratio[j] = amax / block[j]
        for j in range(block.size):
            binade = ((fields[j] & MAGNITUDE) >> 23) - BIAS
            if binade <= BIAS:  # else it is infinite or NaN: zeros have no range
                ranges[min(binade, RANGE_BINS - 1)] += 1


@_compiled
def check(got: Array, want: Array, places: Array, head: Array) -> None:
    """The sums of a gemm check, CHECKED, over what is finite on both sides; float32 in."""
    ww = wg = gg = ee = 0.0
    for j in range(got.size):
        g, w = np.float64(got[j]), np.float64(want[j])
        if finite(g) and finite(w):
            ww += w * w
            wg += w * g
            gg += g * g
            ee += (w - g) * (w - g)
    for i, value in enumerate((ww, wg, gg, ee)):
        head[places[i]] = value


@_compiled
def count_sqnr(lines: Array, bins: Array) -> None:
    """Add a histogram of 10 log10(signal / error) over lines [2, R], which are rows or columns."""
    for i in range(lines.shape[1]):
        signal, error = lines[0, i], lines[1, i]
        if signal == 0.0 and error == 0.0:
            continue  # says nothing
        if error == 0.0:
            bins[bins.size - 1] += 1
        elif signal == 0.0:
            bins[0] += 1
        else:
            place = np.floor((10 * np.log10(signal / error) - SQNR_LOW) / SQNR_WIDTH) + 1
            bins[int(min(max(place, 0.0), bins.size - 1.0))] += 1
