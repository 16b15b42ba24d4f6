"""Sums, squares and counts of 16-bit numbers by the tensor cores, which have nothing else to do while a tensor is cast.

A thread's words are fragments of matrices as they lie in its registers, whichever elements they are: four lanes g share
row g of A (from w0) and row g + 8 (from w1), and column g of B.

    A = [w0; w1], B = w0         C[g, g]     += sum w0^2       and with B = w1, in another C, C[g + 8, g] += sum w1^2
    A = [w0 w2; w1 w3], B = 1    C[g, 0]     += sum w0 + w2    and C[g + 8, 0] += sum w1 + w3
    A = flushed, 1 or 0, B = 1   the same, a count

What else C holds is never read; what is wanted is read off once, when a program ends. Products of two such numbers are
exact in float32.
"""

from __future__ import annotations

from narrowgauge.compute.kernels.fused.constant import Constant

EACH = Constant(16)  # words of a thread, all that it has of a tile
_P = 16


def _four(first: int) -> str:
    return "{" + ", ".join(f"${first + i}" for i in range(4)) + "}"


def _add(kind: str, one: str) -> Constant:
    """PTX that adds a thread's words: a, u, limits; then, in as out, two C of squares, one of sums and one of counts.

    C are four numbers each, the first eight of `squares` and of `sums`. The others are there because a thread has as
    many numbers of everything; the assembler drops them.
    """
    a, u, limit, squares, sums = (_P * i for i in range(2, 7))
    product = f"mma.sync.aligned.m16n8k{{}}.row.col.f32.{kind}.{kind}.f32 "
    wide, narrow = product.format(16), product.format(8)
    lines = ["{ .reg .b32 one; .reg .b32 f<16>;", f"mov.b32 one, {one};"]
    lines += [f"mov.f32 ${i}, 0f00000000; mov.f32 ${_P + i}, 0f00000000;" for i in range(8, _P)]
    square, sum_, count = (_four(0), _four(4)), _four(_P), _four(_P + 4)
    square_before, sum_before, count_before = [_four(squares), _four(squares + 4)], _four(sums), _four(sums + 4)
    for i in range(0, _P, 4):
        flushed = "{" + ", ".join(f"f{j}" for j in range(i, i + 4)) + "}"
        lines += [f"set.le.{kind}x2.{kind}x2 f{j}, ${u + j}, ${limit + j};" for j in range(i, i + 4)]
        lines += [f"{wide}{sum_}, {_four(a + i)}, {{one, one}}, {sum_before};"]
        lines += [f"{wide}{count}, {flushed}, {{one, one}}, {count_before};"]
        for j in (a + i, a + i + 2):
            lines += [f"{narrow}{square[n]}, {{${j}, ${j + 1}}}, {{${j + n}}}, {square_before[n]};" for n in (0, 1)]
            square_before = [*square]
        sum_before, count_before = sum_, count
    return Constant("\n".join([*lines, "}"]))


def _read() -> Constant:
    """PTX that reads totals off what `_add` gathered: squares, sums and counts, in the first number of a thread."""
    squares, sums = 3 * _P, 4 * _P
    zeros = [f"mov.f32 ${_P * n + i}, 0f00000000;" for n in range(3) for i in range(1, _P)]
    return Constant(
        f"""{{ .reg .b32 lane, row, column, odd; .reg .pred even, diagonal, first; .reg .f32 a, b;
        mov.u32 lane, %laneid; shr.u32 row, lane, 2; and.b32 column, lane, 3; and.b32 odd, row, 1;
        shr.u32 row, row, 1; setp.eq.u32 diagonal, row, column; setp.eq.u32 first, column, 0; setp.eq.u32 even, odd, 0;
        add.f32 a, ${squares}, ${squares + 6}; add.f32 b, ${squares + 1}, ${squares + 7};
        selp.f32 a, a, b, even; selp.f32 $0, a, 0f00000000, diagonal;
        add.f32 a, ${sums}, ${sums + 2}; selp.f32 ${_P}, a, 0f00000000, first;
        add.f32 a, ${sums + 4}, ${sums + 6}; selp.f32 ${2 * _P}, a, 0f00000000, first;
        {" ".join(zeros)} }}"""
    )


def _operands(out: int, words: int, numbers: int) -> Constant:
    return Constant(",".join(["=&f"] * (out * _P) + ["r"] * (words * _P) + ["f"] * (numbers * _P)))


ADD_BF16, ADD_FP16, ADD_OPERANDS = _add("bf16", "0x3f803f80"), _add("f16", "0x3c003c00"), _operands(2, 3, 2)
READ, READ_OPERANDS = _read(), _operands(3, 0, 2)
