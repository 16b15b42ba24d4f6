"""Raw sums of a tensor while it is being quantized: what the packed moments are made of, at a few instructions each.

    v = x * inv_scale            what is cast, so that no square leaves float32's range
    s = sum v, q = sum v^2       along runs of neighbours that one thread holds: no shuffles until the end
    u = 2 bits(x) - 1            as an unsigned integer: it has no sign, and a zero is the largest
    amin = least u               flushed: u < 2 bits(the largest number whose code is zero)

What is rare costs nothing until it happens. A program whose sums say that something was not finite, that squares left
float32's range, or that q - s^2/n cancels (mean >> std) looks at its part again, slowly and in float64; so does one
whose amax lies beyond what the scale can hold, to count what saturated.

Every program leaves one record of float64 numbers, in x's own units; `packing` adds them up.

Legend: R = rows of a tile, T = its columns, W = width of a run, J = T / W runs per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rules import magnitude_bits, widen
from narrowgauge.compute.kernels.fused.tile import BF16, larger_halves
from narrowgauge.compute.kernels.fused.tile import high as widen_high
from narrowgauge.compute.kernels.fused.tile import low as widen_low

# A record's numbers. Where one scale serves the whole tensor, SCALED is left out, and SCALE_* but for program 0.
N, SUM, SQUARES, AMIN, AMAX, FLUSHED, SATURATED, NANS, INFS = (Constant(i) for i in range(9))
SCALED, SCALE_N, SCALE_SUM, SCALE_SQUARES, SCALE_MIN, SCALE_MAX = (Constant(i) for i in range(9, 15))
FIELDS = 15
MARGIN = Constant(1 + 2.0**-20)  # amax * fl(448 / amax) exceeds 448 by an ulp in a fifth of all tensors
NOTHING = Constant(0xFFFFFFFF)  # u of a zero
LARGEST = Constant(3.4028234663852886e38)
CANCELS = Constant(64.0)  # mean^2 / variance above which float32 sums of squares are not good enough
FAINT = Constant(1e-24)  # a mean square below which squares may have been lost


@triton.jit
def in_runs(a_RT, W: tl.constexpr):
    """[R, T] -> [R, J, W]: what one thread loaded together stays together."""
    return tl.reshape(a_RT, (a_RT.shape[0], a_RT.shape[1] // W, W))


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
def packed_limit(limit, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """`flush_limit` as `add_own` wants it: doubled, for u; or -1 - that of 16-bit numbers, in both halves of a word."""
    if KIND < BF16 or INTERPRET:
        return limit.to(tl.uint32) * 2
    elif KIND == BF16:
        return (0xFFFF - (limit >> 16)) * 0x10001
    else:
        number = limit.to(tl.float32, bitcast=True)
        half = tl.minimum(number, 65504.0).to(tl.float16)
        bits = half.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where((half.to(tl.float32) > number) & (bits > 0), bits - 1, bits)
        return (0xFFFF - bits) * 0x10001


@triton.jit
def _add_halves(a, b):
    """Sums of both halves of words, each modulo 2^16."""
    return tl.inline_asm_elementwise("add.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _beyond_halves(a, limit, minus):
    """1 in the halves where a is above `limit`, unsigned, 0 in the others; minus is -limit in both halves."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; max.u16x2 t, $1, $2; add.u16x2 t, t, $3; min.u16x2 $0, t, $4; }", "=r,r,r,r,r",
        [a, limit, minus, tl.full(a.shape, 0x10001, tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def add_own(
    s, q, low, flushed, a, b, va, vb, limit, W: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr,
    FACTOR: tl.constexpr = False, factor=1.0,
):  # fmt: skip
    """Add a tile of pairs to the sums of the runs [R, J]. What lies outside the tensor must be zero.

    `low` and `flushed` are those of u, or of 16-bit numbers in both halves of a word, where -|x| takes u's place: as an
    unsigned integer it falls with |x|, and a zero is the smallest. `limit` is one for all, or [R, 1, 1].

    FACTOR: what is summed is v times `factor`, [R, 1] or [1, 1]; it is the sum of a run that is multiplied.
    """
    run, square = tl.sum(in_runs(va + vb, W), 2), tl.sum(in_runs(va * va + vb * vb, W), 2)
    if FACTOR:
        run, square = run * factor, square * factor * factor
    s += run
    q += square
    if KIND >= BF16 and not INTERPRET:
        minus = _add_halves((a & 0x7FFF7FFF) ^ -1, tl.full(a.shape, 0x10001, tl.int32))
        minus = in_runs(minus, W)
        opposite = ((-limit) & 0xFFFF) * 0x10001  # in both halves, before it is spread
        none = tl.full(minus.shape, 0, tl.int32)
        low = larger_halves(low, tl.reduce(minus, 2, larger_halves))
        flushed += tl.sum(_beyond_halves(minus, none + limit, none + opposite), 2)
    else:
        bits, bits_b = widen_low(a, KIND).to(tl.uint32, bitcast=True), widen_high(b, KIND).to(tl.uint32, bitcast=True)
        u, u_b = in_runs(bits + bits - 1, W), in_runs(bits_b + bits_b - 1, W)
        low = tl.minimum(low, tl.min(tl.minimum(u, u_b), 2))
        flushed += tl.sum((u < limit).to(tl.int32) + (u_b < limit).to(tl.int32), 2)
    return s, q, low, flushed


@triton.jit
def add_amax(top, a, b, W: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """The larger magnitudes of the runs' and of a tile's pairs, as bits; of 16-bit numbers in both halves of a word."""
    if KIND >= BF16 and not INTERPRET:
        return larger_halves(top, tl.reduce(in_runs(a & 0x7FFF7FFF, W), 2, larger_halves))
    else:
        bits = tl.maximum(magnitude_bits(widen_low(a, KIND)), magnitude_bits(widen_high(b, KIND)))
        return tl.maximum(top, tl.max(in_runs(bits, W), 2))


@triton.jit
def close_amax(top, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """The bits of the amax that `add_amax` found, as a float32's."""
    if KIND >= BF16 and not INTERPRET:
        top = tl.maximum(magnitude_bits(widen_low(top, KIND)), magnitude_bits(widen_high(top, KIND)))
    return tl.max(tl.max(top, 1), 0)


@triton.jit
def nothing_yet(R: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """What `add_own` adds to, at first."""
    zero = tl.zeros((R, J), tl.float32)
    if KIND >= BF16 and not INTERPRET:
        low = tl.zeros((R, J), tl.int32)
    else:
        low = tl.full((R, J), NOTHING, tl.uint32)
    return zero, zero, low, tl.zeros((R, J), tl.int32)


@triton.jit
def join_own(s, q, low, flushed, s_, q_, low_, flushed_):
    """Two rows' or programs' numbers as one's."""
    return s + s_, q + q_, tl.minimum(low, low_), flushed + flushed_


@triton.jit
def close_own(record, P, s, q, low, flushed, n, unit, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """Write what `add_own` gathered; returns whether float64 has to look again.

    Args:
        record: where this program's numbers go, P apart.
        n: elements of this program.
        unit: float64, v * unit = x.
    """
    s, q, low, flushed = tl.reduce(rows_of_own(s, q, low, flushed, KIND, INTERPRET), 0, join_own)
    return write_own(record, P, s, q, low, flushed, n, unit, KIND, INTERPRET)


@triton.jit
def rows_of_own(s, q, low, flushed, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """What `add_own` gathered, by rows [R], of whole numbers."""
    if KIND >= BF16 and not INTERPRET:
        flushed = (flushed & 0xFFFF) + ((flushed >> 16) & 0xFFFF)
        minus, minus_b = low & 0xFFFF, (low >> 16) & 0xFFFF
        low = tl.minimum((0xFFFF - minus).to(tl.uint32), (0xFFFF - minus_b).to(tl.uint32))  # |x| - 1; 0xFFFF: none
    return tl.reduce((s, q, low, flushed), 1, join_own)


@triton.jit
def write_own(record, P, s, q, low, flushed, n, unit, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """Write what a program gathered, as `close_own` does, which adds it up."""
    if KIND >= BF16 and not INTERPRET:
        some = low != 0xFFFF
        least = (low + 1).to(tl.int32)
        least = widen_low(least, KIND).to(tl.int32, bitcast=True)
    else:
        some = low != NOTHING
        least = (low // 2 + 1).to(tl.int32)
    amin = tl.where(some & (least < 0x7F800000), least.to(tl.float32, bitcast=True), float("inf"))
    s, q, count = s.to(tl.float64), q.to(tl.float64), n.to(tl.float64)
    tl.store(record + N * P, count)
    tl.store(record + SUM * P, s * unit)
    tl.store(record + SQUARES * P, q * unit * unit)
    tl.store(record + AMIN * P, amin.to(tl.float64))
    tl.store(record + FLUSHED * P, flushed.to(tl.float64))
    good = (q < LARGEST) & (q > FAINT * count) & (s * s < CANCELS * (count * q - s * s))
    return some & (good == 0)


@triton.jit
def _join_counts(a, b, c, d, e, f, a_, b_, c_, d_, e_, f_):
    return a + a_, b + b_, c + c_, d + d_, e + e_, tl.maximum(f, f_)


@triton.jit
def recount(
    record, P, x_ptr, M, K, stride_m, stride_k, row0, ROWS: tl.constexpr, col0, inv_scale, limit,
    C: tl.constexpr, T: tl.constexpr, W: tl.constexpr, SPANS: tl.constexpr = 1,
):  # fmt: skip
    """What is rarely needed, by looking again: NaN, Inf and saturated elements, and sums over what is finite.

    Args:
        record: where this program's numbers go, P apart.
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
    tl.store(record + N * P, n.to(tl.float64))
    tl.store(record + SUM * P, total)
    tl.store(record + SQUARES * P, squares)
    tl.store(record + AMAX * P, amax.to(tl.float64))
    tl.store(record + SATURATED * P, beyond.to(tl.float64))
    tl.store(record + NANS * P, nans.to(tl.float64))
    tl.store(record + INFS * P, infs.to(tl.float64))
