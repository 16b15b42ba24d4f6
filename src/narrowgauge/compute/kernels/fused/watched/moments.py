"""What a program leaves of the numbers that it has cast: a record of float64 numbers, in x's own units.

What is rare costs nothing until it happens. A program whose sums say that something was not finite, that squares left
float32's range, or that q - s^2/n cancels (mean >> std) looks at its part again, slowly and in float64; so does one
whose amax lies beyond what the scale can hold, to count what saturated. `packing` adds the records up.

Legend: R = rows of a tile, T = its columns, W = width of a run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rules import widen
from narrowgauge.compute.kernels.fused.watched.sums import in_runs, join_own, least_of, rows_of_own

# A record's numbers. Where one scale serves the whole tensor, SCALED is left out, and SCALE_* but for program 0.
N, SUM, SQUARES, AMIN, AMAX, FLUSHED, SATURATED, NANS, INFS = (Constant(i) for i in range(9))
SCALED, SCALE_N, SCALE_SUM, SCALE_SQUARES, SCALE_MIN, SCALE_MAX = (Constant(i) for i in range(9, 15))
FIELDS = 15
MARGIN = Constant(1 + 2.0**-20)  # amax * fl(448 / amax) exceeds 448 by an ulp in a fifth of all tensors
LARGEST = Constant(3.4028234663852886e38)
CANCELS = Constant(16.0)  # mean^2 / variance above which float32 sums of squares are not good enough
FAINT = Constant(1e-30)  # a mean square below which squares may have been lost


@triton.jit
def flush_limit(inv_scale, HALF: tl.constexpr):
    """Bits of the largest |x| with fl(|x| * inv_scale) <= HALF, int32: from it down, what is not zero is flushed."""
    guess = tl.math.div_rn(tl.full(inv_scale.shape, HALF, tl.float32), inv_scale).to(tl.int32, bitcast=True)
    guess = tl.minimum(guess, 0x7F7FFFFD)
    found = tl.zeros_like(guess)
    for step in tl.static_range(-2, 3):
        bits = tl.maximum(guess + step, 0)
        found = tl.where(bits.to(tl.float32, bitcast=True) * inv_scale <= HALF, bits, found)
    return found


@triton.jit
def flush_limit_of(scale, inv_scale, HALF: tl.constexpr, POW2: tl.constexpr):
    """`flush_limit` without a division, if scale = 1 / inv_scale, to nearest, and HALF is a power of two.

    Then it is HALF * scale, or one of the two floats beside it.
    """
    guess = (scale * HALF).to(tl.int32, bitcast=True)
    if POW2:
        return guess
    found = tl.maximum(guess - 1, 0)
    for step in tl.static_range(0, 2):
        bits = guess + step
        found = tl.where(bits.to(tl.float32, bitcast=True) * inv_scale <= HALF, bits, found)
    return found


@triton.jit
def close_own(
    record, s, q, low, flushed, n, W: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Write what `add_own` gathered; returns whether float64 has to look again.

    Args:
        record: where this program's numbers go.
        n: elements of this program.
    """
    s, q, low, flushed = tl.reduce(rows_of_own(s, q, low, flushed, W, KIND, INTERPRET), 0, join_own)
    return write_own(record, s, q, low, flushed, n, KIND, INTERPRET)


@triton.jit
def write_own(record, s, q, low, flushed, n, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """Write what a program gathered, as `close_own` does, which adds it up."""
    amin, some = least_of(low, KIND, INTERPRET)
    s, q, count = s.to(tl.float64), q.to(tl.float64), n.to(tl.float64)
    tl.store(record + N, count)
    tl.store(record + SUM, s)
    tl.store(record + SQUARES, q)
    tl.store(record + AMIN, amin.to(tl.float64))
    tl.store(record + FLUSHED, flushed.to(tl.float64))
    good = (q < LARGEST) & (q > FAINT * count) & (s * s < CANCELS * (count * q - s * s))
    return some & (good == 0)


@triton.jit
def _join_counts(a, b, c, d, e, f, a_, b_, c_, d_, e_, f_):
    return a + a_, b + b_, c + c_, d + d_, e + e_, tl.maximum(f, f_)


@triton.jit
def recount(
    record, x_ptr, M, K, stride_m, stride_k, row0, ROWS: tl.constexpr, col0, inv_scale, limit,
    C: tl.constexpr, T: tl.constexpr, W: tl.constexpr, SPANS: tl.constexpr = 1,
):  # fmt: skip
    """What is rarely needed, by looking again: NaN, Inf and saturated elements, and sums over what is finite.

    Args:
        record: where this program's numbers go.
        row0, ROWS, col0: the rectangle of ROWS rows and T SPANS columns.
        inv_scale, limit: |x| * inv_scale > limit is saturated.
    """
    total, squares = tl.zeros((C, T // W), tl.float64), tl.zeros((C, T // W), tl.float64)
    nans, infs, beyond = (
        tl.zeros((C, T // W), tl.int32),
        tl.zeros((C, T // W), tl.int32),
        tl.zeros((C, T // W), tl.int32),
    )
    largest = tl.full((C, T // W), -1, tl.int32)
    for first in range(0, ROWS * SPANS, C):
        m = (row0 + first % ROWS + tl.arange(0, C)).to(tl.int64)
        k = (col0 + first // ROWS * T + tl.arange(0, T)).to(tl.int64)
        inside = (m[:, None] < M) & (k[None, :] < K)
        x = widen(tl.load(x_ptr + m[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0.0))
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        finite = bits < 0x7F800000
        nans += tl.sum(in_runs((bits > 0x7F800000).to(tl.int32), W), 2)
        infs += tl.sum(in_runs((bits == 0x7F800000).to(tl.int32), W), 2)
        beyond += tl.sum(in_runs((finite & (tl.abs(x) * inv_scale > limit)).to(tl.int32), W), 2)
        largest = tl.maximum(largest, tl.max(in_runs(tl.where(finite & inside, bits, -1), W), 2))
        wide = in_runs(tl.where(finite, x, 0.0).to(tl.float64), W)
        total += tl.sum(wide, 2)
        squares += tl.sum(wide * wide, 2)
    parts = (total, squares, nans, infs, beyond, largest)
    total, squares, nans, infs, beyond, largest = tl.reduce(tl.reduce(parts, 1, _join_counts), 0, _join_counts)
    amax = tl.where(largest < 0, -float("inf"), largest.to(tl.float32, bitcast=True))
    n = tl.minimum(ROWS, M - row0) * tl.minimum(T * SPANS, K - col0) - nans - infs
    tl.store(record + N, n.to(tl.float64))
    tl.store(record + SUM, total)
    tl.store(record + SQUARES, squares)
    tl.store(record + AMAX, amax.to(tl.float64))
    tl.store(record + SATURATED, beyond.to(tl.float64))
    tl.store(record + NANS, nans.to(tl.float64))
    tl.store(record + INFS, infs.to(tl.float64))
