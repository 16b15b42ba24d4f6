"""The walk over a matrix on the CPU, compiled: all that is counted of an operand, and of a gemm's result.

    survey     all rows       x  ->  extremes, mean, M2 in float64; amax per granule         (host_scales)
    scales     by the rule, or given                                                         (host_scales)
    compare    all rows       x, and codes where there are some  ->  flushed, saturated      (host_compare, host_part)
               some rows      x beside what its codes stand for  ->  float64 sums            (host_rounding)
               some rows      x  ->  higher moments, histograms                              (host_sample)

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
    Array,
    Number,
    as_float,
    compiled,
    mean_of,
    pointer,
    scan,
    together,
)  # fmt: skip
from narrowgauge.observe.stats.host_compare import SHARED as SHARED
from narrowgauge.observe.stats.host_compare import compare
from narrowgauge.observe.stats.host_digest import digest as digest
from narrowgauge.observe.stats.host_moved import FEW as FEW
from narrowgauge.observe.stats.host_moved import LINE as LINE
from narrowgauge.observe.stats.host_moved import copied as copied
from narrowgauge.observe.stats.host_moved import moved as moved
from narrowgauge.observe.stats.host_part import OF_SAMPLE, SUMS
from narrowgauge.observe.stats.host_rounding import FACTS, steps_of
from narrowgauge.observe.stats.host_scales import AMAX, GRANULE, INV, SCALE, make_scales, survey, survey_scales

# Of the files that this one is made of, see host_bits; a test says the number.
PARTS = 2822295617

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
_EVERY_COMPARED, _TEAM = ASKED.index("every_compared"), ASKED.index("team_at")
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
            is sampled, and every `every_compared`-th compared with its codes, and summed along columns; all of them
            where those are zeros and others are not.
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
    of_granules, low_of = np.zeros((len(GRANULE), granules), np.int32), np.empty(-(-M // step), np.int32)
    amax_of = of_granules[AMAX]
    largest, smallest, mean, m2 = survey(x_at, shift, M, K, stride, step, tall, wide, low_of, amax_of, asked[_TEAM])
    if largest >= INFINITY:
        return False
    scale, inv = of_granules[SCALE].view(np.float32), of_granules[INV].view(np.float32)
    if scale_at:
        given = carray(pointer(scale_at), (granules,), np.float32)
        for g in range(granules):
            scale[g] = given[g]
    else:
        make_scales(amax_of, facts, limits, scale, inv)
    scales = np.empty(len(SCALES))
    if not survey_scales(of_granules, not codes_at, steps_of(facts, limits), limits, scales):
        return False
    counted, lost, sums = np.empty(len(COUNTED)), np.empty(2), np.empty(len(SUMS))
    if not compare(
        x_at, asked, first, first_compared, step, facts, limits, of_granules, low_of, smallest, asked[_TEAM], lost,
        sums, columns, vector[starts[0] : starts[1]], vector[starts[6] : starts[7]], vector[starts[2] : starts[3]],
        vector[starts[4] : starts[5]],
    ):  # fmt: skip
        return False
    # Nothing but zeros were compared: of a gradient that one token of each sequence has, say. Then all rows are.
    if sums[0] == 0.0 and largest > 0 and every_compared > 1:
        of_all = asked.copy()
        of_all[_EVERY_COMPARED], first_compared, every_compared = 1, 0, 1
        if not compare(
            x_at, of_all, first, 0, step, facts, limits, of_granules, low_of, smallest, asked[_TEAM], lost, sums,
            columns, vector[starts[0] : starts[1]], vector[starts[6] : starts[7]],
            np.zeros(starts[3] - starts[2]), np.zeros(starts[5] - starts[4]),
        ):  # fmt: skip
            return False
    share = np.float64(M) / -(-(M - first_compared) // every_compared)
    for i in range(OF_SAMPLE):
        sums[i] *= share
    counted[_NAN], counted[_INF], counted[_AMAX], counted[_AMIN] = 0.0, 0.0, as_float(largest), as_float(smallest)
    counted[_N] = counted[_SCALED] = counted[_COMPARED] = np.float64(M) * K
    counted[_MEAN], counted[_M2], counted[_FLUSHED], counted[_SATURATED] = mean, m2, lost[0], lost[1]
    counted[_SCALED_XX], counted[_FLUSHED_XX], counted[_XX], counted[_XD] = sums[0], sums[4], sums[0], sums[1]
    counted[_DD], counted[_EE] = sums[2], sums[3]
    sampled = sums[OF_SAMPLE:]
    for values, ahead in ((counted, 0), (sampled, len(COUNTED)), (scales, len(COUNTED) + len(SAMPLED))):
        for i in range(values.size):
            vector[places[ahead + i]] = values[i]
    return True


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
