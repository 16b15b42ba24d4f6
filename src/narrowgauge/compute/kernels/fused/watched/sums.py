"""Sums, extremes and counts of a program's numbers, tile by tile: a few instructions each, in x's own units.

    s = sum x, q = sum x^2       float32, in an order that the registers give
    u = bits(|x|) - 1            as an unsigned integer: it has no sign, and a zero is the largest
    amin = least u, plus 1       flushed: u < bits(the largest number whose code is zero)

Numbers of 16 bits are added up by the tensor cores, which have nothing else to do while a tensor is cast. A thread's
words are fragments of matrices as they lie in its registers, whichever elements they are: four lanes g share row g of
A (from w0) and row g + 8 (from w1), and column g of B.

    A = [w0; w1], B = w0         C[g, g]     += sum w0^2       and with B = w1, in another C, C[g + 8, g] += sum w1^2
    A = [w0 w2; w1 w3], B = 1    C[g, 0]     += sum w0 + w2    and C[g + 8, 0] += sum w1 + w3
    A = flushed, 1 or 0, B = 1   the same, a count

What else C holds is never read; what is wanted is read off once, when a program ends. Products of two such numbers are
exact in float32. A zero's u is a NaN, if it is taken for a number: it is never below a limit.

Legend: R = rows of a tile, T = its words, W = width of a run, J = T / W runs per row, P = words of a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rules import magnitude_bits
from narrowgauge.compute.kernels.fused.tile import BF16, larger_halves
from narrowgauge.compute.kernels.fused.tile import high as widen_high
from narrowgauge.compute.kernels.fused.tile import low as widen_low

NOTHING = Constant(0xFFFFFFFF)  # u of a zero
_LESS_ONE = Constant("{ .reg .b32 less; mov.b32 less, -1; add.u16x2 $0, $1, less; }")
FEW, MANY = Constant(8), Constant(16)  # words of a thread that there is PTX for


def _registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


def _add(kind: str, one: str, P: int) -> Constant:
    """PTX that adds P words: a, u, limits; then, in as out, two C of squares, one of sums and one of counts.

    C are four numbers each, the first of P numbers `squares` and `sums`; what is over of them is not used.
    """
    a, u, limit, old = (2 * P + P * i for i in range(4))
    product = f"mma.sync.aligned.m16n8k{{}}.row.col.f32.{kind}.{kind}.f32 "
    wide, narrow = product.format(16), product.format(8)
    lines = ["{ .reg .b32 one; .reg .b32 f<16>;", f"mov.b32 one, {one};"]
    lines += [f"mov.f32 ${i}, 0f00000000; mov.f32 ${P + i}, 0f00000000;" for i in range(8, P)]
    c = {at: _registers(at if at < 8 else P + at - 8, 4) for at in (0, 4, 8, 12)}  # squares, squares, sums, counts
    before = {at: _registers(old + (at if at < 8 else P + at - 8), 4) for at in (0, 4, 8, 12)}
    for i in range(0, P, 4):
        flushed = ", ".join(f"f{j}" for j in range(i, i + 4))
        lines += [f"set.le.{kind}x2.{kind}x2 f{j}, ${u + j}, ${limit + j};" for j in range(i, i + 4)]
        lines += [f"{wide}{c[8]}, {_registers(a + i, 4)}, {{one, one}}, {before[8]};"]
        lines += [f"{wide}{c[12]}, {{{flushed}}}, {{one, one}}, {before[12]};"]
        for j in (i, i + 2):
            lines += [f"{narrow}{c[4 * n]}, {_registers(a + j, 2)}, {{${a + j + n}}}, {before[4 * n]};" for n in (0, 1)]
            before |= {0: c[0], 4: c[4]}
        before |= {8: c[8], 12: c[12]}
    return Constant("\n".join([*lines, "}"]))


def _read(P: int) -> Constant:
    """PTX that reads totals off the C of `_add`: squares, sums and counts of a thread, 0 in all but one of P."""
    squares, sums = 3 * P, 4 * P
    zeros = [f"mov.f32 ${P * n + i}, 0f00000000;" for n in range(3) for i in range(1, P)]
    return Constant(
        f"""{{ .reg .b32 lane, row, column, odd; .reg .pred even, diagonal, first; .reg .f32 a, b;
        mov.u32 lane, %laneid; shr.u32 row, lane, 2; and.b32 column, lane, 3; and.b32 odd, row, 1;
        shr.u32 row, row, 1; setp.eq.u32 diagonal, row, column; setp.eq.u32 first, column, 0; setp.eq.u32 even, odd, 0;
        add.f32 a, ${squares}, ${squares + 6}; add.f32 b, ${squares + 1}, ${squares + 7};
        selp.f32 a, a, b, even; selp.f32 $0, a, 0f00000000, diagonal;
        add.f32 a, ${sums}, ${sums + 2}; selp.f32 ${P}, a, 0f00000000, first;
        add.f32 a, ${sums + 4}, ${sums + 6}; selp.f32 ${2 * P}, a, 0f00000000, first;
        {" ".join(zeros)} }}"""
    )


def _operands(P: int, out: int, words: int, numbers: int) -> Constant:
    return Constant(",".join(["=&f"] * (out * P) + ["r"] * (words * P) + ["f"] * (numbers * P)))


_ADD_BF16_FEW, _ADD_BF16_MANY = (_add("bf16", "0x3f803f80", P.value) for P in (FEW, MANY))
_ADD_FP16_FEW, _ADD_FP16_MANY = (_add("f16", "0x3c003c00", P.value) for P in (FEW, MANY))
_ADDED_FEW, _ADDED_MANY = (_operands(P.value, 2, 3, 2) for P in (FEW, MANY))
_READ_FEW, _READ_MANY = (_read(P.value) for P in (FEW, MANY))
_OFF_FEW, _OFF_MANY = (_operands(P.value, 3, 0, 2) for P in (FEW, MANY))


@triton.jit
def in_runs(a_RT, W: tl.constexpr):
    """[R, T] -> [R, J, W]: what one thread loaded together stays together."""
    return tl.reshape(a_RT, (a_RT.shape[0], a_RT.shape[1] // W, W))


@triton.jit
def packed_limit(limit, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """Bits of the largest |x| that is flushed as `add_own` wants them: as u; of 16-bit numbers in both halves."""
    if KIND < BF16 or INTERPRET:
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
    if KIND >= BF16 and not INTERPRET:
        none = tl.zeros((R, T), tl.float32)
        return none, none, tl.full((R, J), -1, tl.int32), 0  # s counts
    else:
        none = tl.zeros((R, J), tl.float32)
        return none, none, tl.full((R, J), NOTHING, tl.uint32), tl.zeros((R, J), tl.int32)


@triton.jit
def add_own(
    s, q, low, flushed, a, b, limit, W: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Add a tile of pairs to what was gathered. What lies outside the tensor must be zero.

    Args:
        limit: as `packed_limit` gives it, one for all or [R, 1].
    """
    if KIND >= BF16 and not INTERPRET:
        u = _less_one(a & 0x7FFF7FFF)
        low = _smaller_halves(low, tl.reduce(in_runs(u, W), 2, _smaller_halves))
        FOR_FEW: tl.constexpr = _ADD_BF16_FEW if KIND == BF16 else _ADD_FP16_FEW
        FOR_MANY: tl.constexpr = _ADD_BF16_MANY if KIND == BF16 else _ADD_FP16_MANY
        ADD: tl.constexpr = FOR_FEW if P == FEW else FOR_MANY
        OPERANDS: tl.constexpr = _ADDED_FEW if P == FEW else _ADDED_MANY
        q, s = tl.inline_asm_elementwise(
            ADD, OPERANDS, [a, u, tl.zeros_like(a) + limit, q, s], dtype=(tl.float32, tl.float32), is_pure=True, pack=P
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
def rows_of_own(s, q, low, flushed, W: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """What was gathered, by rows [R]: only their totals mean something."""
    if KIND >= BF16 and not INTERPRET:
        READ: tl.constexpr = _READ_FEW if P == FEW else _READ_MANY
        OFF: tl.constexpr = _OFF_FEW if P == FEW else _OFF_MANY
        FOUND: tl.constexpr = (tl.float32, tl.float32, tl.float32)
        q, s, count = tl.inline_asm_elementwise(READ, OFF, [q, s], dtype=FOUND, is_pure=True, pack=P)
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
    if KIND >= BF16 and not INTERPRET:
        some, bits = low != 0xFFFF, (low + 1).to(tl.int32)
        bits = widen_low(bits, KIND).to(tl.int32, bitcast=True)
    else:
        some, bits = low != NOTHING, (low + 1).to(tl.int32)
    return tl.where(some & (bits < 0x7F800000), bits.to(tl.float32, bitcast=True), float("inf")), some


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
