"""The walks over a matrix on the CPU, compiled: one over all of it, one over what is to be compared with its codes.

    survey     all rows       float32 x  ->  extremes, mean, M2 in float64; amax per granule  (see host_scales)
    scales     by the rule, or given
    lost       all rows       x, and codes where there are some  ->  flushed, saturated
    compare    some rows      x, d = codes * scale, or what codes would stand for (host_rounding)  ->  float64 sums

Loops are branch-free, so that they vectorize. What is not all finite is given back uncounted, for the passes that take
anything. A run of rows that has nothing as small as the limit of flushing is not read for it.

float64 holds the squares of all float32 numbers and of their products, so nothing is rescaled.

Sums over the compared rows are multiplied by (all elements / compared ones), as a GPU's kernels do: ratios are then the
share's own, and sums over microbatches and ranks weigh every tensor by its size.

Counting with `sum += 1.0 if ... else 0.0` in float32 is exact below 2^24 columns, and ten times faster than in int64.

Legend: M = rows, K = columns, R, C = rows and columns of granules.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from narrowgauge.observe.stats.host_bits import (
    INFINITY,
    MAGNITUDE,
    NONE,
    ONE,
    Array,
    Number,
    as_float,
    bits_of,
    compiled,
    mean_of,
    pointer,
    scan,
    together,
)  # fmt: skip
from narrowgauge.observe.stats.host_digest import digest as digest
from narrowgauge.observe.stats.host_moved import FEW as FEW
from narrowgauge.observe.stats.host_moved import LINE as LINE
from narrowgauge.observe.stats.host_moved import copied as copied
from narrowgauge.observe.stats.host_moved import moved as moved
from narrowgauge.observe.stats.host_rounding import (
    BEYOND,
    FACTS,
    Steps,
    decode_row,
    round_row,
    spread,
    steps_of,
    zero_codes,
)  # fmt: skip
from narrowgauge.observe.stats.host_sample import sample, sqnr_bin
from narrowgauge.observe.stats.host_scales import make_scales, survey, survey_scales
from narrowgauge.observe.stats.host_team import GRAIN as GRAIN

# Of the files that this one is made of, see host_bits; a test says the number.
PARTS = 3608372026

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


# What is asked of an operand, in one array of int64, because each argument of a compiled function costs at every call:
# how x lies, where its codes and scales are, which rows are looked at; its shape and that of a granule; who shares the
# work; FACTS; where in the packed vector COUNTED, SAMPLED and SCALES go; and where there the SQNR of rows, exponents,
# ranges and the SQNR of columns begin and end.
ASKED = (
    *("shift", "stride", "codes_at", "scale_at", "first", "every", "first_compared", "every_compared"),
    *("M", "K", "tall", "wide", "team_at"),
)
_FACTS, _PLACES = len(ASKED), len(ASKED) + len(FACTS)
_STARTS = _PLACES + len(COUNTED) + len(SAMPLED) + len(SCALES)


@compiled
def operand(x_at: Number, turn: int, asked: Array, limits: Array, vector: Array, columns: Array) -> bool:
    """Everything of an operand into its packed vector; False, and nothing to be used, if not all of it is finite.

    Args:
        x_at: address of float32 numbers, or of bfloat16 (`shift` 16); `stride` elements from row to row.
        turn: is added to `first` and `first_compared`.
        asked: ASKED, and what comes behind it. Codes [M, K] and scales, one per granule, are at 0 to go by the rule;
            `tall`, `wide` are rows and columns of a granule, `team_at` the address of a TEAM or 0. Every `every`-th row
            is sampled, and every `every_compared`-th compared with its codes, and summed along columns.
        limits: LIMITS of the format and the rule.
        vector: [width] float64, neutral; filled.
        columns: [2, K] float64, to which the sums of x^2 and e^2 along columns are added.
    """
    shift, stride, codes_at, scale_at, M, K, tall, wide = (
        asked[0], asked[1], asked[2], asked[3], asked[8], asked[9], asked[10], asked[11],
    )  # fmt: skip
    every, every_compared = asked[5], asked[7]
    first, first_compared = (asked[4] + turn) % every, (asked[6] + turn) % every_compared
    facts, places, starts = asked[_FACTS:_PLACES], asked[_PLACES:_STARTS], asked[_STARTS:]
    granules = -(-M // tall) * -(-K // wide)
    step = together(K, stride, granules)
    amax_of, low_of = np.zeros(granules, np.int32), np.empty(-(-M // step), np.int32)
    largest, smallest, mean, m2 = survey(x_at, shift, M, K, stride, step, tall, wide, low_of, amax_of, asked[12])
    if largest >= INFINITY:
        return False
    scale, inv, back = np.empty(granules, np.float32), np.empty(granules, np.float32), np.empty(granules, np.float32)
    if scale_at:
        given = carray(pointer(scale_at), (granules,), np.float32)
        for g in range(granules):
            scale[g] = given[g]
    else:
        make_scales(amax_of, facts, limits, scale, inv)
    flushed, saturates, scales = np.empty(granules, np.int32), np.empty(granules, np.int8), np.empty(len(SCALES))
    steps = steps_of(facts, limits)
    if not survey_scales(amax_of, scale, inv, not codes_at, steps, limits, back, flushed, saturates, scales):
        return False
    counted, sampled = np.zeros(len(COUNTED)), np.empty(len(SAMPLED))
    if not _count_lost(
        x_at, shift, M, K, stride, step, codes_at, tall, wide, facts, limits[BEYOND], low_of, flushed, back, saturates,
        counted,
    ):  # fmt: skip
        return False
    _compare(
        x_at, shift, M, K, stride, step, codes_at, tall, wide, facts, steps, scale, inv, low_of, flushed,
        first_compared, every_compared, counted, vector[starts[0] : starts[1]], columns,
    )  # fmt: skip
    counted[_AMAX], counted[_AMIN], counted[_MEAN], counted[_M2] = as_float(largest), as_float(smallest), mean, m2
    counted[_N] = counted[_SCALED] = counted[_COMPARED] = np.float64(M) * K
    exponents, ranges = vector[starts[2] : starts[3]], vector[starts[4] : starts[5]]
    sample(x_at, shift, M, K, stride, first, every, sampled, exponents, ranges)
    count_columns(columns, vector[starts[6] : starts[7]])
    for values, ahead in ((counted, 0), (sampled, len(COUNTED)), (scales, len(COUNTED) + len(SAMPLED))):
        for i in range(values.size):
            vector[places[ahead + i]] = values[i]
    return True


@compiled
def _count_lost(
    x_at: Number, shift: int, M: int, K: int, stride: int, step: int, codes_at: Number, tall: int, wide: int,
    facts: Array, beyond: Number, low_of: Array, flushed: Array, back: Array, saturates: Array, sums: Array,
) -> bool:  # fmt: skip
    """Count flushed and saturated elements, with or without codes; False if a code is no number."""
    C, at = -(-K // wide), -1
    room, line, width = np.empty(step * K, np.int32), np.empty(step * K, np.float32), step * K if C == 1 else wide
    limit = np.empty(step * K, np.int32)
    for i in range(0, M, step):
        start, size, g = i * stride, min(step, M - i) * K, i // tall * C
        some, all_above = False, True
        for c in range(C):
            some = some or saturates[g + c] != 0
            all_above = all_above and low_of[i // step] > flushed[g + c]
        if codes_at or not all_above:
            bits = bits_of(x_at, shift, start, size, room)
            if codes_at:
                zeros = zero_codes(bits, carray(pointer(codes_at + i * K), (size,), np.uint8), facts)
                if zeros < NONE:
                    return False
            else:
                if g != at:
                    at = g
                    spread(flushed, g, C, width, limit)
                zeros = NONE
                for j in range(size):
                    gone = np.uint32((bits[j] & MAGNITUDE) - np.int32(1)) < np.uint32(limit[j])
                    zeros += ONE if gone else NONE
            sums[_FLUSHED] += zeros
        if some:
            x = bits_of(x_at, shift, start, size, room).view(np.float32)
            spread(back, g, C, width, line)
            above = NONE
            for j in range(size):
                above += ONE if abs(x[j]) * line[j] > beyond else NONE
            sums[_SATURATED] += above
    return True


@compiled
def _compare(
    x_at: Number, shift: int, M: int, K: int, stride: int, step: int, codes_at: Number, tall: int, wide: int,
    facts: Array, steps: Steps, scale: Array, inv: Array, low_of: Array, flushed: Array, first: int, every: int,
    sums: Array, row_bins: Array, columns: Array,
) -> None:  # fmt: skip
    """Sum the errors of some rows, scaled up to all of them, along each of them, and along columns."""
    C, at, rows, most = -(-K // wide), -1, 0, np.int32(0)
    # What is found of a row waits here: to look for its bin at once would hold up the next row's sums.
    signals, errors = np.empty((M - first + every - 1) // every), np.empty((M - first + every - 1) // every)
    room, limit = np.empty(K, np.int32), np.empty(K, np.int32)
    d, scale_of, inv_of = np.empty(K, np.float32), np.empty(K, np.float32), np.empty(K, np.float32)
    lost, signal, error = 0.0, columns[0], columns[1]
    for i in range(first, M, every):
        if i // tall != at:
            at = i // tall
            spread(scale, at * C, C, wide, scale_of)
            if not codes_at:
                spread(inv, at * C, C, wide, inv_of)
                spread(flushed, at * C, C, wide, limit)
                most = np.int32(0)
                for c in range(C):
                    most = max(most, flushed[at * C + c])
        bits = bits_of(x_at, shift, i * stride, K, room)
        x = bits.view(np.float32)
        if codes_at:
            codes = carray(pointer(codes_at + i * K), (K,), np.uint8)
            decode_row(codes, facts, scale_of, d)
            if sums[_FLUSHED]:
                for j in range(K):
                    v = np.float64(x[j])
                    lost += v * v if (codes[j] & 0x7F) == 0 else 0.0
        else:
            round_row(x, inv_of, scale_of, steps, d)
            if low_of[i // step] <= most:  # else nothing of this run of rows was flushed
                for j in range(K):
                    v = np.float64(x[j])
                    lost += v * v if np.int32(bits[j] & MAGNITUDE) <= limit[j] else 0.0
        xx = xd = dd = ee = 0.0
        for j in range(K):
            v, w = np.float64(x[j]), np.float64(d[j])
            e = v - w
            xx += v * v
            xd += v * w
            dd += w * w
            ee += e * e
            signal[j] += v * v
            error[j] += e * e
        sums[_XX] += xx
        sums[_XD] += xd
        sums[_DD] += dd
        sums[_EE] += ee
        signals[rows], errors[rows] = xx, ee
        rows += 1
    for i in range(rows):
        place = sqnr_bin(signals[i], errors[i])
        if place >= 0:
            row_bins[place] += 1
    sums[_FLUSHED_XX], sums[_SCALED_XX] = lost, sums[_XX]
    share = np.float64(M) / rows
    for slot in (_SCALED_XX, _FLUSHED_XX, _XX, _XD, _DD, _EE):
        sums[slot] *= share


@compiled
def result(
    y_at: Number, shift: int, M: int, N: int, stride: int, got_at: Number, want_at: Number, size: int, places: Array,
    check_places: Array, head: Array,
) -> bool:  # fmt: skip
    """A result's own moments, the first of COUNTED, into the head of its packed vector; as `operand` does it.

    `got_at`, `want_at`: addresses of `size` float32 numbers, whose gemm check goes with it; 0 for none.
    """
    step, total, energy, n = together(N, stride, 1), 0.0, 0.0, np.float64(M) * N
    room = np.empty(step * N, np.int32)
    largest, smallest, about = np.int32(0), INFINITY, mean_of(y_at, shift, min(step, M) * N, room)
    for i in range(0, M, step):
        high, low, s, ss = scan(y_at, shift, i * stride, min(step, M - i) * N, about)
        largest, smallest = max(largest, high), min(smallest, low)
        total += s
        energy += ss
    if largest >= INFINITY:
        return False
    head[places[_NAN]], head[places[_INF]], head[places[_N]] = 0.0, 0.0, n
    head[places[_AMAX]], head[places[_AMIN]] = as_float(largest), as_float(smallest)
    head[places[_MEAN]], head[places[_M2]] = about + total / n, max(0.0, energy - total * total / n)
    if size:
        got = carray(pointer(got_at), (size,), np.float32)
        _check(got, carray(pointer(want_at), (size,), np.float32), check_places, head)
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
    head[places[0]], head[places[1]], head[places[2]], head[places[3]] = ww, wg, gg, ee


@compiled
def count_columns(columns: Array, bins: Array) -> None:
    """Add a histogram of the SQNR of columns, whose sums of x^2 and e^2 are given, [2, K]."""
    for j in range(columns.shape[1]):
        place = sqnr_bin(columns[0, j], columns[1, j])
        if place >= 0:
            bins[place] += 1
