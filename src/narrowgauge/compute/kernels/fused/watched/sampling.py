"""What is taken from a share of the rows, in the launch that quantizes them all.

    errors     of every 31 rows one, or `group` neighbours, others with every turn: xx, xd, dd, ee, lost;
               per row sum v^2 and sum e^2, per column the same over a band of rows        e = code - v, xd = sum v code
    sample     rows first + i * stride: central moments to the fourth, exponents, ranges of blocks of 128 columns

Both are the work of programs of their own, which come first: the other programs need not hold their registers, and
nothing has to wait at the end.

Legend: C = rows looked at together, TW = words (pairs of columns) of a program, M = rows, K = columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rules import to_codes, widen
from narrowgauge.compute.kernels.fused.tile import SIDE, high, load, low, row_amaxes
from narrowgauge.compute.kernels.fused.watched.grains import LINES, SQUARES, WHOLE, scales_of
from narrowgauge.metrics.bins import EXPONENT_BINS, EXPONENT_LOW, RANGE_BINS, RANGE_BLOCK

TAKEN, XX, XD, DD, EE, LOST = (Constant(i) for i in range(6))  # numbers of a program that looks at errors
ERRORS = 6
LOW = Constant(EXPONENT_LOW + 127)  # the exponent field of bin 1
TOP = Constant(EXPONENT_BINS - 2)
LAST = Constant(RANGE_BINS - 1)
BLOCK = Constant(RANGE_BLOCK)
_SIDE = Constant(SIDE)
EXPONENTS = Constant(EXPONENT_BINS)
RANGES = Constant(64)  # room for RANGE_BINS: a histogram's bins are a power of two
COUNTS = EXPONENT_BINS + 64  # numbers that a program of the sample counts
GROUP = 5  # n, mean, M2, M3, M4
SAMPLE_ROWS = 16  # rows of such a program


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
def _join_errors(a, b, c, d, e, f, a_, b_, c_, d_, e_, f_):
    return a + a_, b + b_, c + c_, d + d_, e + e_, f + f_


@triton.jit
def _add_errors(
    signal, error, xd, dd, lost, x, inverse, factor,
    GRAINED: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Add the products of v and d to sums along columns and in all; returns v^2 and e^2 too."""
    v = x * inverse
    d = decoded(to_codes(v, MANTISSA, MAX, INTERPRET), MANTISSA, INTERPRET)
    if GRAINED:
        v, d = v * factor, d * factor
    e = d - v
    away = tl.where(d == 0.0, v, 0.0)
    return signal + v * v, error + e * e, xd + v * d, dd + d * d, lost + away * away, v * v, e * e


@triton.jit
def look_at_errors(
    record, E, rows_ptr, columns_ptr, lines, x_ptr, M, K, stride_m, stride_w, line0, word0, group, phase,
    inv_scale, unit, bits_ptr, bits_stride, GRAIN: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr,
    MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr, INTERPRET: tl.constexpr,
    EVERY: tl.constexpr, TAKE: tl.constexpr, C: tl.constexpr, TW: tl.constexpr,
):  # fmt: skip
    """Errors of TAKE taken rows and of 2 TW columns, under one inv_scale, or a scale per grain.

    Args:
        record: where this program's ERRORS numbers go, E apart.
        rows_ptr: sums of v^2 by taken row, and `lines` further those of e^2, float32.
        columns_ptr: sums of v^2 of these rows by column, and K further those of e^2.
        line0, word0: the first taken row and word.
        group, phase: taken are rows with (m % EVERY) // group == phase.
        unit: float64, v * unit = x.
        bits_ptr, GRAIN: where codes are not made under inv_scale, but sums are. LINES: the bits of the rows' amaxes.
            SQUARES: of those of these columns' squares, bits_stride apart. TILES are these columns' own.
    """
    W = tl.cdiv(K, 2)
    w = (word0 + tl.arange(0, TW)).to(tl.int64)
    none = tl.zeros((C, TW), tl.float32)
    signal_a, signal_b, error_a, error_b, xd, dd, lost = none, none, none, none, none, none, none
    xx, ee = tl.zeros((C,), tl.float64), tl.zeros((C,), tl.float64)
    taken = tl.zeros((C,), tl.int32)
    for first in range(0, TAKE, C):
        line = line0 + first + tl.arange(0, C)
        m = (line // group * EVERY + phase * group + line % group).to(tl.int64)
        a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
        xa, xb, seen = low(a, KIND), high(b, KIND), m < M
        inverse, factor = inv_scale, 1.0
        if GRAIN != WHOLE:
            if GRAIN == SQUARES:
                bits = tl.load(bits_ptr + m // _SIDE * bits_stride, mask=seen, other=0)
            elif GRAIN == LINES:
                bits = tl.load(bits_ptr + m, mask=seen, other=0)
            else:
                bits = row_amaxes(a, b, KIND, INTERPRET)
            scale, inverse, healthy = scales_of(bits, GOAL, POW2, FLOOR)
            seen = seen & healthy
            xa, xb = tl.where(healthy[:, None], xa, 0.0), tl.where(healthy[:, None], xb, 0.0)
            inverse, factor = inverse[:, None], (scale * inv_scale)[:, None]
        signal_a, error_a, xd, dd, lost, vv, rr = _add_errors(
            signal_a, error_a, xd, dd, lost, xa, inverse, factor, GRAIN != WHOLE, MANTISSA, MAX, INTERPRET
        )
        signal_b, error_b, xd, dd, lost, vv_b, rr_b = _add_errors(
            signal_b, error_b, xd, dd, lost, xb, inverse, factor, GRAIN != WHOLE, MANTISSA, MAX, INTERPRET
        )
        row_signal, row_error = tl.sum(vv + vv_b, 1), tl.sum(rr + rr_b, 1)
        tl.store(rows_ptr + line, row_signal, mask=line < lines)
        tl.store(rows_ptr + lines + line, row_error, mask=line < lines)
        xx += row_signal.to(tl.float64)
        ee += row_error.to(tl.float64)
        taken += seen.to(tl.int32)
    at = columns_ptr + 2 * w
    tl.store(at, tl.sum(signal_a, 0), mask=2 * w < K)
    tl.store(at + 1, tl.sum(signal_b, 0), mask=2 * w + 1 < K)
    tl.store(at + K, tl.sum(error_a, 0), mask=2 * w < K)
    tl.store(at + K + 1, tl.sum(error_b, 0), mask=2 * w + 1 < K)
    xd, dd, lost = tl.sum(xd, 1).to(tl.float64), tl.sum(dd, 1).to(tl.float64), tl.sum(lost, 1).to(tl.float64)
    parts = (xx, ee, xd, dd, lost, taken)
    xx, ee, xd, dd, lost, taken = tl.reduce(parts, 0, _join_errors)
    square = unit * unit
    tl.store(record + TAKEN * E, (taken * tl.minimum(2 * TW, K - 2 * word0)).to(tl.float64))
    tl.store(record + XX * E, xx * square)
    tl.store(record + XD * E, xd * square)
    tl.store(record + DD * E, dd * square)
    tl.store(record + EE * E, ee * square)
    tl.store(record + LOST * E, lost * square)


@triton.jit
def look_at_sample(
    group_ptr, counts_ptr, samples, x_ptr, M, K, stride_m, stride_k, first, stride, taken, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Block `pid` of the sampled rows: its central moments, exponents and ranges.

    Args:
        group_ptr: GROUP float64 numbers, `samples` apart.
        counts_ptr: COUNTS int32 numbers per program.
        first, stride, taken: the sampled rows are first + i * stride, i below `taken`.
        blocks: runs of 128 columns per row.
    """
    pid = tl.program_id(0)
    i = pid // blocks * ROWS + tl.arange(0, ROWS)
    m = (first + i * stride).to(tl.int64)
    k = (pid % blocks * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    inside = (i < taken)[:, None] & (k[None, :] < K)
    x = widen(tl.load(x_ptr + m[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0.0))
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    counted = inside & (bits < 0x7F800000)
    bits = tl.where(counted, bits, 0)

    binade = tl.minimum(tl.maximum((bits >> 23) - LOW, 0), TOP) + 1
    exponents = tl.histogram(tl.reshape(tl.where(bits == 0, 0, binade), (ROWS * WIDTH,)), EXPONENTS,
                             mask=tl.reshape(counted, (ROWS * WIDTH,)))  # fmt: skip
    tl.store(counts_ptr + pid * COUNTS + tl.arange(0, EXPONENTS), exponents)
    magnitude = bits.to(tl.float32, bitcast=True)
    ratio = tl.math.div_rn(
        tl.max(magnitude, 1)[:, None] + tl.zeros_like(magnitude), tl.where(bits == 0, 1.0, magnitude)
    )
    binade = (ratio.to(tl.int32, bitcast=True) >> 23) - 127
    ranged = counted & (bits != 0) & (binade < 128)  # beyond, the quotient is infinite
    ranges = tl.histogram(tl.reshape(tl.minimum(tl.maximum(binade, 0), LAST), (ROWS * WIDTH,)), RANGES,
                          mask=tl.reshape(ranged, (ROWS * WIDTH,)))  # fmt: skip
    tl.store(counts_ptr + pid * COUNTS + EXPONENTS + tl.arange(0, RANGES), ranges)

    n = tl.sum(tl.sum(counted.to(tl.int32), 1), 0).to(tl.float64)
    wide = tl.where(counted, x, 0.0).to(tl.float64)
    mean = tl.sum(tl.sum(wide, 1), 0) / tl.maximum(n, 1.0)
    p = tl.where(counted, wide - mean, 0.0)
    square = p * p
    tl.store(group_ptr + pid, n)
    tl.store(group_ptr + samples + pid, mean)
    tl.store(group_ptr + 2 * samples + pid, tl.sum(tl.sum(square, 1), 0))
    tl.store(group_ptr + 3 * samples + pid, tl.sum(tl.sum(square * p, 1), 0))
    tl.store(group_ptr + 4 * samples + pid, tl.sum(tl.sum(square * square, 1), 0))
