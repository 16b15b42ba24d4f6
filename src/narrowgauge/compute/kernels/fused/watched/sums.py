"""Sums, extremes and counts of a program's numbers, tile by tile: a few instructions each, in x's own units.

    s = sum x, q = sum x^2       float32, in an order that the registers give
    u = bits(|x|) - 1            as an unsigned integer: it has no sign, and a zero is the largest
    amin = least u, plus 1       flushed: u < bits(the largest number whose code is zero), or u <= bits - 1

Numbers of 16 bits are added up by the [tensor cores](tensor_cores.py), where a thread must have EACH words of a tile. A
zero's u is a NaN, if it is taken for a number: it is never below a limit.

Legend: R = rows of a tile, T = its words, W = width of a run, J = T / W runs per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rules import magnitude_bits
from narrowgauge.compute.kernels.fused.tile import BF16, in_pairs, larger_halves
from narrowgauge.compute.kernels.fused.tile import high as widen_high
from narrowgauge.compute.kernels.fused.tile import low as widen_low
from narrowgauge.compute.kernels.fused.watched.tensor_cores import (
    ADD_BF16,
    ADD_FP16,
    ADD_OPERANDS,
    EACH,
    READ,
    READ_OPERANDS,
)

NOTHING = Constant(0xFFFFFFFF)  # u of a zero
_LESS_ONE = Constant("{ .reg .b32 less; mov.b32 less, -1; add.u16x2 $0, $1, less; }")


@triton.jit
def in_runs(a_RT, W: tl.constexpr):
    """[R, T] -> [R, J, W]: what one thread loaded together stays together."""
    return tl.reshape(a_RT, (a_RT.shape[0], a_RT.shape[1] // W, W))


@triton.jit
def packed_limit(limit, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """Bits of the largest |x| that is flushed as `add_own` wants them.

    u of a number that is flushed is below them, or, as a 16-bit number, at most one less, in both halves of a word.
    """
    if not in_pairs(KIND, INTERPRET):
        return limit.to(tl.uint32)
    elif KIND == BF16:
        return (((limit >> 16) - 1) & 0xFFFF) * 0x10001
    else:
        number = limit.to(tl.float32, bitcast=True)
        half = tl.minimum(number, 65504.0).to(tl.float16)
        bits = half.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where((half.to(tl.float32) > number) & (bits > 0), bits - 1, bits)
        return ((bits - 1) & 0xFFFF) * 0x10001


@triton.jit
def _less_one(a):
    """Both halves of words less one, each modulo 2^16."""
    return tl.inline_asm_elementwise(_LESS_ONE, "=r,r", [a], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _smaller_halves(a, b):
    return tl.inline_asm_elementwise("min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def nothing_yet(R: tl.constexpr, T: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """What `add_own` adds to, at first: s, q, the least u and how many were flushed."""
    J: tl.constexpr = T // W
    if in_pairs(KIND, INTERPRET):
        none = tl.zeros((R, T), tl.float32)
        return none, none, tl.full((R, J), -1, tl.int32), 0  # s counts
    else:
        none = tl.zeros((R, J), tl.float32)
        return none, none, tl.full((R, J), NOTHING, tl.uint32), tl.zeros((R, J), tl.int32)


@triton.jit
def add_own(s, q, low, flushed, a, b, limit, W: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """Add a tile of pairs to what was gathered. What lies outside the tensor must be zero.

    Args:
        limit: as `packed_limit` gives it, one for all or [R, 1].
    """
    if in_pairs(KIND, INTERPRET):
        u = _less_one(a & 0x7FFF7FFF)
        low = _smaller_halves(low, tl.reduce(in_runs(u, W), 2, _smaller_halves))
        ADD: tl.constexpr = ADD_BF16 if KIND == BF16 else ADD_FP16
        FOUND: tl.constexpr = (tl.float32, tl.float32)
        q, s = tl.inline_asm_elementwise(
            ADD, ADD_OPERANDS, [a, u, tl.zeros_like(a) + limit, q, s], dtype=FOUND, is_pure=True, pack=EACH
        )
    else:
        xa, xb = widen_low(a, KIND), widen_high(b, KIND)
        s += tl.sum(in_runs(xa + xb, W), 2)
        q += tl.sum(in_runs(xa * xa + xb * xb, W), 2)
        u, u_b = (magnitude_bits(xa) - 1).to(tl.uint32), (magnitude_bits(xb) - 1).to(tl.uint32)
        low = tl.minimum(low, tl.min(in_runs(tl.minimum(u, u_b), W), 2))
        flushed += tl.sum(in_runs((u < limit).to(tl.int32) + (u_b < limit).to(tl.int32), W), 2)
    return s, q, low, flushed


@triton.jit
def rows_of_own(s, q, low, flushed, W: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """What was gathered, by rows [R]: only their totals mean something."""
    if in_pairs(KIND, INTERPRET):
        FOUND: tl.constexpr = (tl.float32, tl.float32, tl.float32)
        q, s, count = tl.inline_asm_elementwise(READ, READ_OPERANDS, [q, s], dtype=FOUND, is_pure=True, pack=EACH)
        s, q, flushed = tl.sum(in_runs(s, W), 2), tl.sum(in_runs(q, W), 2), tl.sum(in_runs(count, W), 2).to(tl.int32)
        low = tl.minimum((low & 0xFFFF).to(tl.uint32), ((low >> 16) & 0xFFFF).to(tl.uint32))
    return tl.reduce((s, q, low, flushed), 1, join_own)


@triton.jit
def join_own(s, q, low, flushed, s_, q_, low_, flushed_):
    """Two rows' or programs' numbers as one's."""
    return s + s_, q + q_, tl.minimum(low, low_), flushed + flushed_


@triton.jit
def least_of(low, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """The least magnitude that is not zero, of the least u: float32, Inf if there is none or none is finite."""
    if in_pairs(KIND, INTERPRET):
        some, bits = low != 0xFFFF, (low + 1).to(tl.int32)
        bits = widen_low(bits, KIND).to(tl.int32, bitcast=True)
    else:
        some, bits = low != NOTHING, (low + 1).to(tl.int32)
    return tl.where(some & (bits < 0x7F800000), bits.to(tl.float32, bitcast=True), float("inf")), some


@triton.jit
def add_amax(top, a, b, W: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """The larger magnitudes of the runs' and of a tile's pairs, as bits; of 16-bit numbers in both halves of a word."""
    if in_pairs(KIND, INTERPRET):
        return larger_halves(top, tl.reduce(in_runs(a & 0x7FFF7FFF, W), 2, larger_halves))
    else:
        bits = tl.maximum(magnitude_bits(widen_low(a, KIND)), magnitude_bits(widen_high(b, KIND)))
        return tl.maximum(top, tl.max(in_runs(bits, W), 2))


@triton.jit
def close_amax(top, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """The bits of the amax that `add_amax` found, as a float32's."""
    if in_pairs(KIND, INTERPRET):
        top = tl.maximum(magnitude_bits(widen_low(top, KIND)), magnitude_bits(widen_high(top, KIND)))
    return tl.max(tl.max(top, 1), 0)
