"""What a cast lost, from a share of the rows: other ones with every turn, all of a small tensor's.

    v = x inv_scale, d = its code's number, e = d - v
    of the share      xx = sum v^2, ee = sum e^2, xd = sum v d, dd = sum d^2, and the flushed energy
    per row           sum v^2 and sum e^2
    per column        the same over a band of rows

all in one unit, however many scales there are. It is the work of programs of their own, as the sample's is.

Legend: C = rows looked at together, TW = words (pairs of columns) of a program, M = rows, K = columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rules import to_codes
from narrowgauge.compute.kernels.fused.tile import (
    BF16,
    SIDE,
    high,
    load,
    low,
    row_amaxes,
    store_where_it_lies,
)
from narrowgauge.compute.kernels.fused.watched.grains import HELD, LINES, SQUARES, WHOLE, scales_of
from narrowgauge.compute.kernels.fused.watched.sums import in_runs

TAKEN, XX, XD, DD, EE, LOST = (Constant(i) for i in range(6))  # numbers of a program that looks at errors
ERRORS = 6
_SIDE = Constant(SIDE)


@triton.jit
def decoded(codes, MANTISSA: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 of codes given as bytes; in the interpreter, whose casts are wrong, by arithmetic."""
    if INTERPRET:
        BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
        magnitude = (codes & 0x7F).to(tl.int32)
        normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        subnormal = magnitude.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA))
        value = tl.where((magnitude >> MANTISSA) == 0, subnormal, normal)
        return tl.where(codes >= 128, -value, value)
    else:
        return codes.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5, bitcast=True).to(tl.float32)


@triton.jit
def _errors_of(x, inverse, MANTISSA: tl.constexpr, MAX: tl.constexpr, INTERPRET: tl.constexpr):
    """v^2, e^2, v d, d^2, and v^2 where the code is zero."""
    v = x * inverse
    d = decoded(to_codes(v, MANTISSA, MAX, INTERPRET), MANTISSA, INTERPRET)
    e = d - v
    vv = v * v
    return vv, e * e, v * d, d * d, tl.where(d == 0.0, vv, 0.0)


@triton.jit
def _join_two(a, b, a_, b_):
    return a + a_, b + b_


@triton.jit
def _join_three(a, b, c, a_, b_, c_):
    return a + a_, b + b_, c + c_


@triton.jit
def _join_all(a, b, c, d, e, f, a_, b_, c_, d_, e_, f_):
    return a + a_, b + b_, c + c_, d + d_, e + e_, f + f_


@triton.jit
def look_at_errors(
    record, E, rows_ptr, columns_ptr, lines, x_ptr, M, K, W, stride_m, stride_w, line0, word0, share, phase,
    inv_scale, unit, bits_ptr, bits_stride, GRAIN: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr,
    MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr, INTERPRET: tl.constexpr,
    TAKE: tl.constexpr, C: tl.constexpr, TW: tl.constexpr, RUN: tl.constexpr, ROW: tl.constexpr = 0,
):  # fmt: skip
    """Errors of TAKE taken rows, or of those left, and of 2 TW columns, under one inv_scale, or a scale per grain.

    Args:
        record: where this program's ERRORS numbers go, E apart.
        rows_ptr: sums of v^2 by taken row, and `lines` further those of e^2, float32.
        columns_ptr: sums of v^2 of these rows by column, and K further those of e^2.
        line0, word0: the first taken row and word.
        share, phase: taken are rows with m % share == phase.
        unit: float64, v * unit = x.
        bits_ptr, GRAIN: where codes are not made under inv_scale, but sums are. LINES: the bits of the rows' amaxes.
            SQUARES: of those of these columns' squares, bits_stride apart. TILES are these columns' own. HELD: rows of
            up to ROW words bring theirs.
        RUN: words summed by one thread before anything else.
    """
    w = (word0 + tl.arange(0, TW)).to(tl.int64)
    none, few = tl.zeros((C, TW), tl.float32), tl.zeros((C, TW // RUN), tl.float32)
    signal_a, signal_b, error_a, error_b, xd, dd, lost = none, none, none, none, few, few, few
    xx, ee = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    taken = tl.zeros((C,), tl.int32)
    AHEAD: tl.constexpr = (GRAIN == HELD) & (C == 1)  # several rows are on their way together as it is
    if GRAIN == HELD:
        every = tl.arange(0, ROW).to(tl.int64)
    if AHEAD:
        begin = ((line0 + tl.arange(0, C)) * share + phase).to(tl.int64)
        next_c, next_d = load(x_ptr, begin, every, M, K, W, stride_m, stride_w, KIND)
    first, ours = tl.zeros_like(lines), tl.zeros_like(lines) + TAKE
    if GRAIN != HELD:  # which takes few, for whom a loop of known length needs fewer registers
        ours = tl.minimum(ours, lines - line0)  # the last band has what is left
    while first < ours:
        line = line0 + first + tl.arange(0, C)
        m = line * share + phase
        a, b = load(x_ptr, m.to(tl.int64), w, M, K, W, stride_m, stride_w, KIND)
        seen, inverse = m < M, inv_scale
        if GRAIN != WHOLE:
            if GRAIN == SQUARES:
                bits = tl.load(bits_ptr + m // _SIDE * bits_stride, mask=seen, other=0)
            elif GRAIN == LINES:
                bits = tl.load(bits_ptr + m, mask=seen, other=0)
            elif GRAIN == HELD:
                if AHEAD:
                    c, d = next_c, next_d  # the next row is on its way while this one is worked on
                    more = tl.where(first + 1 < ours, M, 0)
                    next_c, next_d = load(x_ptr, m.to(tl.int64) + share, every, more, K, W, stride_m, stride_w, KIND)
                else:
                    c, d = load(x_ptr, m.to(tl.int64), every, M, K, W, stride_m, stride_w, KIND)
                bits = row_amaxes(c, d, KIND, INTERPRET)
            else:
                bits = row_amaxes(a, b, KIND, INTERPRET)
            scale, inverse, healthy = scales_of(bits, GOAL, POW2, FLOOR)
            seen, inverse = seen & healthy, inverse[:, None]
            a = tl.where(healthy[:, None], a, 0)
            b = a if KIND >= BF16 else tl.where(healthy[:, None], b, 0)
            factor = tl.where(bits > 0, scale * inv_scale, 0.0)  # a zero's scale is 1, whatever the others are
            square = factor * factor
        vv_a, rr_a, xd_a, dd_a, lost_a = _errors_of(low(a, KIND), inverse, MANTISSA, MAX, INTERPRET)
        vv_b, rr_b, xd_b, dd_b, lost_b = _errors_of(high(b, KIND), inverse, MANTISSA, MAX, INTERPRET)
        row_signal, row_error = tl.reduce((vv_a + vv_b, rr_a + rr_b), 1, _join_two)
        run_xd, run_dd = tl.sum(in_runs(xd_a + xd_b, RUN), 2), tl.sum(in_runs(dd_a + dd_b, RUN), 2)
        run_lost = tl.sum(in_runs(lost_a + lost_b, RUN), 2)
        if GRAIN == WHOLE:
            signal_a, signal_b, error_a, error_b = signal_a + vv_a, signal_b + vv_b, error_a + rr_a, error_b + rr_b
            xd, dd, lost = xd + run_xd, dd + run_dd, lost + run_lost
        else:
            row_signal, row_error = row_signal * square, row_error * square
            square = square[:, None]
            signal_a, signal_b = signal_a + vv_a * square, signal_b + vv_b * square
            error_a, error_b = error_a + rr_a * square, error_b + rr_b * square
            xd, dd, lost = xd + run_xd * square, dd + run_dd * square, lost + run_lost * square
        store_where_it_lies(rows_ptr + line, row_signal, line < lines, INTERPRET)
        store_where_it_lies(rows_ptr + lines + line, row_error, line < lines, INTERPRET)
        xx, ee, taken = xx + row_signal, ee + row_error, taken + seen.to(tl.int32)
        first += C
    at = columns_ptr + 2 * w
    tl.store(at, tl.sum(signal_a, 0), mask=2 * w < K)
    tl.store(at + 1, tl.sum(signal_b, 0), mask=2 * w + 1 < K)
    tl.store(at + K, tl.sum(error_a, 0), mask=2 * w < K)
    tl.store(at + K + 1, tl.sum(error_b, 0), mask=2 * w + 1 < K)
    xd, dd, lost = tl.reduce((xd, dd, lost), 1, _join_three)
    xx, ee, xd, dd, lost, taken = tl.reduce((xx, ee, xd, dd, lost, taken), 0, _join_all)
    square = unit * unit
    tl.store(record + TAKEN * E, (taken * tl.maximum(tl.minimum(2 * TW, K - 2 * word0), 0)).to(tl.float64))
    tl.store(record + XX * E, xx.to(tl.float64) * square)
    tl.store(record + XD * E, xd.to(tl.float64) * square)
    tl.store(record + DD * E, dd.to(tl.float64) * square)
    tl.store(record + EE * E, ee.to(tl.float64) * square)
    tl.store(record + LOST * E, lost.to(tl.float64) * square)
