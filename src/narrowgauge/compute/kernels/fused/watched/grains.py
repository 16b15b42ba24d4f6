"""Scales of many grains, while a tensor is quantized under them: what the moments and the errors need of each.

    TILES      a scale per row of a tile of 128 columns      from the tile itself
    SQUARES    one per tile of 128 x 128                     from the tile itself
    LINES      one per row of the tensor                     from the row's amax, which an earlier launch left
    HELD       the same                                      from the row itself, which a program holds as a whole

Legend: R = scales met at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rules import inv_scale_of, scale_of
from narrowgauge.compute.kernels.fused.tile import load, row_amaxes
from narrowgauge.compute.kernels.fused.watched.moments import (
    AMAX,
    INFS,
    NANS,
    SATURATED,
    SCALE_MAX,
    SCALE_MIN,
    SCALE_N,
    SCALE_SQUARES,
    SCALE_SUM,
    SCALED,
    write_own,
)
from narrowgauge.compute.kernels.fused.watched.sums import join_own, rows_of_own

WHOLE, TILES, SQUARES, LINES, HELD = (Constant(i) for i in range(5))  # WHOLE: one scale for all
GOLDEN = Constant(0.6180339887498949)  # fractions of its multiples lie evenly between 0 and 1, however many they are


@triton.jit
def scales_of(bits, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr):
    """Of amaxes, given as bits: scales (0 of what is not finite), what codes are made with (then 1), whether finite.

    The latter may lie an ulp beside the inverse of the scale, which beside a tie would make another code.
    """
    amax = bits.to(tl.float32, bitcast=True)
    inverse, healthy = inv_scale_of(amax, GOAL, POW2, FLOOR), amax < float("inf")
    scale = scale_of(amax, inverse, POW2)
    return tl.where(healthy, scale, 0.0), tl.where(healthy, inverse, 1.0), healthy


@triton.jit
def common_inverse(
    ptr, x_ptr, M, K, W, stride_m, stride_w, GRAIN: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    KIND: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """An inv_scale by the largest amax of ROWS rows that lie all over the tensor; 1 if these are zeros or not finite.

    It is the same in all programs, whose sums can so be added.

    Args:
        ptr: for LINES, the bits of the amaxes of M rows, or of whatever has some. Else rows' first WORDS words tell.
    """
    turns = tl.arange(0, ROWS).to(tl.float32) * GOLDEN
    m = tl.minimum(((turns - tl.floor(turns)) * M).to(tl.int32), M - 1)
    if GRAIN == LINES:
        bits = tl.load(ptr + m)
    else:
        a, b = load(x_ptr, m.to(tl.int64), tl.arange(0, WORDS).to(tl.int64), M, K, W, stride_m, stride_w, KIND)
        bits = row_amaxes(a, b, KIND, INTERPRET)
    largest = tl.max(tl.where(bits < 0x7F800000, bits, 0), 0)
    inverse = inv_scale_of(largest.to(tl.float32, bitcast=True), GOAL, POW2, FLOOR)
    return tl.where(largest > 0, inverse, 1.0)


@triton.jit
def no_scales(R: tl.constexpr):
    """What `add_scales` adds to, at first: a count, a sum, a sum of squares, the least and the largest."""
    none, infinite = tl.zeros((R,), tl.float64), tl.full((R,), float("inf"), tl.float32)
    return tl.zeros((R,), tl.int32), none, none, infinite, -infinite


@triton.jit
def add_scales(count, total, squares, least, largest, scale, counted):
    """Add scales [R], those that are counted."""
    wide = tl.where(counted, scale, 0.0).to(tl.float64)
    least = tl.minimum(least, tl.where(counted, scale, float("inf")))
    largest = tl.maximum(largest, tl.where(counted, scale, -float("inf")))
    return count + counted.to(tl.int32), total + wide, squares + wide * wide, least, largest


@triton.jit
def close_lines(
    record, s, q, low, flushed, n, count, total, squares, least, largest, top,
    W: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """`close_own` and `close_scales` where sums and scales lie by rows: everything is added up at once.

    Returns whether float64 has to look again, how many scales there were, and the largest of `top`.
    """
    s, q, low, flushed = rows_of_own(s, q, low, flushed, W, KIND, INTERPRET)
    parts = (s, q, low, flushed, count, total, squares, least, largest, top)
    s, q, low, flushed, count, total, squares, least, largest, top = tl.reduce(parts, 0, _join_lines)
    again = write_own(record, s, q, low, flushed, n, KIND, INTERPRET)
    write_scales(record, count, total, squares, least, largest)
    return again, count, top


@triton.jit
def _join_lines(s, q, w, f, a, b, c, d, e, t, s_, q_, w_, f_, a_, b_, c_, d_, e_, t_):
    s, q, w, f = join_own(s, q, w, f, s_, q_, w_, f_)
    a, b, c, d, e = _join_scales(a, b, c, d, e, a_, b_, c_, d_, e_)
    return s, q, w, f, a, b, c, d, e, tl.maximum(t, t_)


@triton.jit
def _join_scales(a, b, c, d, e, a_, b_, c_, d_, e_):
    return a + a_, b + b_, c + c_, tl.minimum(d, d_), tl.maximum(e, e_)


@triton.jit
def close_scales(record, count, total, squares, least, largest):
    """Write what `add_scales` gathered; returns how many there were."""
    count, total, squares, least, largest = tl.reduce((count, total, squares, least, largest), 0, _join_scales)
    write_scales(record, count, total, squares, least, largest)
    return count


@triton.jit
def write_scales(record, count, total, squares, least, largest):
    """Write what `close_scales` added up."""
    tl.store(record + SCALE_N, count.to(tl.float64))
    tl.store(record + SCALE_SUM, total)
    tl.store(record + SCALE_SQUARES, squares)
    tl.store(record + SCALE_MIN, least.to(tl.float64))
    tl.store(record + SCALE_MAX, largest.to(tl.float64))


@triton.jit
def turned_scales(
    ptr, even, odd, w, K, W, store, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr
):  # fmt: skip
    """From the bits of the amaxes of even and odd columns: inv_scales of both; scales, if asked to, in memory."""
    amax_low, amax_high = even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
    inv_low, inv_high = inv_scale_of(amax_low, GOAL, POW2, FLOOR), inv_scale_of(amax_high, GOAL, POW2, FLOOR)
    if store:
        tl.store(ptr + 2 * w, scale_of(amax_low, inv_low, POW2), mask=w < W)
        tl.store(ptr + 2 * w + 1, scale_of(amax_high, inv_high, POW2), mask=2 * w + 1 < K)
    return inv_low, inv_high


@triton.jit
def close_grained(record, amax, scaled, columns, at, ratio_ptr):
    """Write what a record holds beside, where every scale is of its numbers' own amax, which nothing exceeds."""
    tl.store(record + AMAX, amax.to(tl.float64))
    tl.store(record + SCALED, (scaled * columns).to(tl.float64))
    tl.store(record + SATURATED, 0.0)
    tl.store(record + NANS, 0.0)
    tl.store(record + INFS, 0.0)
    if at == 0:
        tl.store(ratio_ptr, -float("inf"))  # none: no scale was given
