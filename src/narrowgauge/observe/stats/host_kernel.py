"""One walk over a matrix on the CPU, compiled: rows come into the cache once, and everything is counted from there.

    codes given    x, codes, scales  ->  d = codes * scale
    a rule given   x  ->  amax per granule  ->  inv_scale  ->  d = what the codes would stand for (see host_rounding)
    either way     float32 x, d  ->  float64 sums

Loops are branch-free, so that they vectorize. What is not all finite is given back uncounted, for the passes that take
anything.

float64 holds the squares of all float32 numbers and of their products, so nothing is rescaled, and differences of sums
keep more digits than float32 data have:

    mean = s / n        M2 = xx - s^2 / n        dd = ee - xx + 2 xd        s = sum x, xx = sum x^2, ...

Counting with `sum += 1.0 if ... else 0.0` in float32 is exact below 2^24 columns, and ten times faster than in int64.

Legend: M = rows, K = columns, RC = granules.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from narrowgauge.observe.stats.host_bits import (
    INFINITY,
    NONE,
    ONE,
    Array,
    Number,
    as_float,
    compiled,
    extremes,
    load,
    pointer,
    together,
)  # fmt: skip
from narrowgauge.observe.stats.host_rounding import (
    BEYOND,
    Steps,
    decode_row,
    inverse,
    make_scales,
    nearest,
    round_row,
    spread,
    steps_of,
)  # fmt: skip
from narrowgauge.observe.stats.host_sample import count_sqnr, sample

# Of the files that this one is made of, see host_bits; a test says the number.
PARTS = 3287468346

# What the walk leaves in its sums, in this order; of a result the first seven.
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


@compiled
def operand(
    x_at: Number, shift: int, M: int, K: int, stride: int, codes_at: Number, scale_at: Number, tall: int, wide: int,
    facts: Array, limits: Array, first: int, every: int, first_summed: int, every_summed: int, places: Array,
    starts: Array, vector: Array, columns: Array,
) -> bool:  # fmt: skip
    """Everything of an operand into its packed vector; False, and nothing to be used, if not all of it is finite.

    Args:
        x_at: address of float32 numbers, or of bfloat16 (shift 16); `stride` elements from row to row.
        codes_at, scale_at: addresses of codes [M, K] and their scales, one per granule; 0 to go by the rule.
        tall, wide: rows and columns of a granule.
        facts, limits: FACTS and LIMITS of the format and the rule.
        first, every: which rows are sampled, and which of them the sums along columns are over.
        places: where in the vector COUNTED, SAMPLED and SCALES go.
        starts: where in the vector the SQNR of rows, exponents and ranges begin and end, [6].
        vector: [width] float64, neutral; filled.
        columns: [2, K] float64, to which the sums of x^2 and e^2 along columns are added.
    """
    R, C = -(-M // tall), -(-K // wide)
    scale_RC, inv_RC = np.empty((R, C), np.float32), np.empty((R, C), np.float32)
    if scale_at:
        scale_RC[:] = carray(pointer(scale_at), (R, C), np.float32)
    elif not make_scales(x_at, shift, M, K, stride, tall, wide, facts, limits, scale_RC, inv_RC):
        return False
    counted, sampled = np.zeros(len(COUNTED)), np.empty(len(SAMPLED))
    if not count_codes(
        x_at, shift, M, K, stride, codes_at, scale_RC, inv_RC, tall, wide, facts, limits, first_summed, every_summed,
        counted, vector[starts[0] : starts[1]], columns,
    ):  # fmt: skip
        return False
    exponents, ranges = vector[starts[2] : starts[3]], vector[starts[4] : starts[5]]
    sample(x_at, shift, M, K, stride, first, every, sampled, exponents, ranges)
    scales = np.array(count_scales(scale_RC))
    for place, value in zip(places, np.concatenate((counted, sampled, scales))):  # noqa: B905, what zip has when compiled
        vector[place] = value
    return True


@compiled
def count_scales(scale_RC: Array) -> tuple[float, float, float, float, float]:
    """n, mean, M2, minimum and maximum of the scales, all of which are finite."""
    total = m2 = 0.0
    for value in scale_RC.flat:
        total += np.float64(value)
    mean = total / scale_RC.size
    for value in scale_RC.flat:
        m2 += (np.float64(value) - mean) ** 2
    return np.float64(scale_RC.size), mean, m2, np.float64(scale_RC.min()), np.float64(scale_RC.max())


@compiled
def count_codes(
    x_at: Number, shift: int, M: int, K: int, stride: int, codes_at: Number, scale_RC: Array, inv_RC: Array,
    tall: int, wide: int, facts: Array, limits: Array, first: int, every: int, sums: Array, row_bins: Array,
    columns: Array,
) -> bool:  # fmt: skip
    """Count a matrix and what became of it: `sums` as in COUNTED; the rest as for `operand`."""
    uniform = scale_RC.size == 1
    step = together(K, stride, scale_RC.size)
    bits, d_all = np.empty(step * K, np.int32), np.empty(step * K, np.float32)
    scale, inv, back = (np.empty(step * K, np.float32), np.empty(step * K, np.float32), np.empty(step * K, np.float32))
    back_RC = scale_RC.copy()
    for r in range(back_RC.shape[0]):
        for c in range(back_RC.shape[1]):
            back_RC[r, c] = inverse(scale_RC[r, c])
    steps, beyond = steps_of(facts, limits), limits[BEYOND]
    largest, smallest = np.int32(0), INFINITY
    for i in range(0, M, step):
        size = min(step, M - i) * K
        if i % tall == 0:
            for values_RC, out in ((scale_RC, scale), (inv_RC, inv), (back_RC, back)):
                spread(values_RC[i // tall], scale.size if uniform else wide, out)
        x_bits, d = bits[:size], d_all[:size]
        x = x_bits.view(np.float32)
        load(x_at, shift, i * stride, x_bits)
        high, low = extremes(x_bits)
        largest, smallest = max(largest, high), min(smallest, low)
        codes = carray(pointer(codes_at + i * K), size, np.uint8)
        zeros = decode_row(codes, facts, scale, d) if codes_at else round_row(x, inv, scale, steps, d)
        if zeros < NONE or high >= INFINITY:
            return False
        # Rounding is monotone: where the largest is not beyond the limit, none is.
        if not uniform or as_float(high) * back[0] > beyond:
            above = NONE
            for j in range(size):
                above += ONE if abs(x[j]) * back[j] > beyond else NONE
            sums[_SATURATED] += above
        if zeros:
            _count_flushed(x, codes, codes_at != 0, inv, steps, sums)
        for row in range(size // K):
            xx, ee = _count_row(x[row * K : (row + 1) * K], d[row * K : (row + 1) * K], sums)
            if not (xx < np.inf and ee < np.inf):  # a scale is no number
                return False
            count_sqnr(xx, ee, row_bins)
            if (i + row) % every == first:
                for j in range(K):
                    v = np.float64(x[row * K + j])
                    e = v - np.float64(d[row * K + j])
                    columns[0, j] += v * v
                    columns[1, j] += e * e
    xx, n = sums[_XX], np.float64(M) * K
    sums[_DD] = max(0.0, sums[_EE] - xx + 2 * sums[_XD])
    for slot in (_SCALED, _COMPARED):
        sums[slot] = n
    sums[_SCALED_XX] = xx
    _finish(n, xx, largest, smallest, sums)
    return True


@compiled
def _count_row(x: Array, d: Array, sums: Array) -> tuple[float, float]:
    """A row's sums of x^2 and e^2, which are added to the matrix's with the others."""
    s = xx = xd = ee = 0.0
    for j in range(x.size):
        v, w = np.float64(x[j]), np.float64(d[j])
        e = v - w
        s += v
        xx += v * v
        xd += v * w
        ee += e * e
    sums[_MEAN] += s
    sums[_XX] += xx
    sums[_XD] += xd
    sums[_EE] += ee
    return xx, ee


@compiled
def _count_flushed(x: Array, codes: Array, coded: bool, inv: Array, steps: Steps, sums: Array) -> None:
    flushed, energy = NONE, 0.0
    for j in range(x.size):
        zero = (codes[j] & 0x7F) == 0 if coded else nearest(x[j], inv[j], steps) == NONE
        gone = zero and x[j] != NONE
        v = np.float64(x[j]) if gone else 0.0
        flushed += ONE if gone else NONE
        energy += v * v
    sums[_FLUSHED] += flushed
    sums[_FLUSHED_XX] += energy


@compiled
def _finish(n: Number, xx: Number, largest: Number, smallest: Number, sums: Array) -> None:
    """Central moments from raw sums, and magnitudes from their bits; the slot of the mean holds the sum."""
    sums[_AMAX], sums[_AMIN], sums[_N] = as_float(largest), as_float(smallest), n
    sums[_MEAN] /= n
    sums[_M2] = max(0.0, xx - n * sums[_MEAN] ** 2)


@compiled
def result(
    y_at: Number, shift: int, M: int, N: int, stride: int, got_at: Number, want_at: Number, size: int, places: Array,
    check_places: Array, head: Array,
) -> bool:  # fmt: skip
    """A result's own moments, the first of COUNTED, into the head of its packed vector; as `operand` does it.

    `got_at`, `want_at`: addresses of `size` float32 numbers, whose gemm check goes with it; 0 for none.
    """
    sums = np.zeros(OWN)
    step = together(N, stride, 1)
    bits, energy = np.empty(step * N, np.int32), 0.0
    largest, smallest = np.int32(0), INFINITY
    for i in range(0, M, step):
        part = bits[: min(step, M - i) * N]
        y = part.view(np.float32)
        load(y_at, shift, i * stride, part)
        high, low = extremes(part)
        largest, smallest = max(largest, high), min(smallest, low)
        s = yy = 0.0
        for j in range(y.size):
            v = np.float64(y[j])
            s += v
            yy += v * v
        sums[_MEAN] += s
        energy += yy
    if largest >= INFINITY:
        return False
    _finish(np.float64(M) * N, energy, largest, smallest, sums)
    for place, value in zip(places[:OWN], sums):  # noqa: B905, what zip has when compiled
        head[place] = value
    if size:
        got = carray(pointer(got_at), size, np.float32)
        _check(got, carray(pointer(want_at), size, np.float32), check_places, head)
    return True


@compiled
def _check(got: Array, want: Array, places: Array, head: Array) -> None:
    """The sums of a gemm check, CHECKED, over what is finite on both sides."""
    ww = wg = gg = ee = 0.0
    for j in range(got.size):
        g, w = np.float64(got[j]), np.float64(want[j])
        if abs(g) < np.inf and abs(w) < np.inf:
            ww += w * w
            wg += w * g
            gg += g * g
            ee += (w - g) * (w - g)
    for i, value in enumerate((ww, wg, gg, ee)):
        head[places[i]] = value


@compiled
def count_columns(columns: Array, bins: Array) -> None:
    """Add a histogram of the SQNR of columns, whose sums of x^2 and e^2 are given, [2, K]."""
    for j in range(columns.shape[1]):
        count_sqnr(columns[0, j], columns[1, j], bins)
