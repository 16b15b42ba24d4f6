"""A tile of x, two neighbours along K to a word, and its codes in both layouts.

    word = x[m, 2w] | x[m, 2w + 1] << 16           as two 16-bit numbers lie in memory

One instruction makes two codes of two numbers, one compares two 16-bit magnitudes with two others, and turning words
is cheaper than turning bytes. So kernels work on pairs of neighbours (a, b), each [tile_M, tile_W]:

    kind     a, b
    HALVES   both the words of bfloat16 or float16         two more of them come of `low` and `high`
    WIDE     float32 of even and odd columns, loaded as 64-bit words
    ANY      the same, loaded one by one: any dtype and strides, for odd K

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq
from triton.runtime.jit import constexpr_function

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rules import magnitude_bits, to_code_pairs, to_codes, widen

ANY, WIDE, BF16, FP16 = (Constant(i) for i in range(4))
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
SIDE = 128  # rows and columns of a tile: a block's, and four warps' or eight's worth of registers


def even(x_MK: Tensor) -> tuple[Tensor, int, int, int, int]:
    """x_MK, copied if it does not lie in words in memory though it could, and its `words`.

    The copy is two more passes, instead of single bytes.
    """
    found = words(x_MK)
    if x_MK.shape[1] % 2 or found[3]:
        return x_MK, *found
    x_MK = copied(x_MK)
    return x_MK, *words(x_MK)


def copied(x_MK: Tensor) -> Tensor:
    """x_MK in words."""
    return x_MK.clone(memory_format=torch.contiguous_format)


def words(x_MK: Tensor) -> tuple[int, int, int, int]:
    """W, strides along M and W in words (in elements for ANY), and the kind of word that x_MK can be loaded as."""
    K = x_MK.shape[1]
    stride_m, stride_k = x_MK.stride()
    whole = stride_k == 1 and K % 2 == 0 and stride_m % 2 == 0
    if whole and x_MK.data_ptr() % (2 * x_MK.element_size()) == 0:
        return K // 2, stride_m // 2, 1, _KINDS[x_MK.dtype]
    return (K + 1) // 2, stride_m, stride_k, 0


def registers(kind: int, most: int) -> int | None:
    """`most` for words of 16-bit numbers: more programs at once are worth it. The other kinds need what they take."""
    return most if kind >= _KINDS[torch.bfloat16] else None


def tiles(M: int, W: int) -> int:
    """One program per tile; one even of nothing, for someone has to write the scale."""
    return max(1, -(-M // SIDE) * -(-2 * W // SIDE))


@triton.jit
def place(W, SIDE: tl.constexpr, BACKWARDS: tl.constexpr):
    """Row and word indices of this program's tile, int64, and the tile's own two; neighbours along K run together.

    BACKWARDS: the last tiles first, which the cache still holds from whoever read or wrote x before.
    """
    program = tl.program_id(0)
    if BACKWARDS:
        program = tl.num_programs(0) - 1 - program
    program = program.to(tl.uint32)
    tiles_w = tl.maximum((W + (SIDE // 2 - 1)) // (SIDE // 2), 1).to(tl.uint32)
    tile_m = (program // tiles_w).to(tl.int64)
    tile_w = (program % tiles_w).to(tl.int64)
    m = tile_m * SIDE + tl.arange(0, SIDE)
    w = tile_w * (SIDE // 2) + tl.arange(0, SIDE // 2)
    return m, w, tile_m, tile_w


@triton.jit
def load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND: tl.constexpr):
    """The pairs (a, b) of a tile; zeros outside of x."""
    inside = (m[:, None] < M) & (w[None, :] < W)
    at = m[:, None] * stride_m
    if KIND == ANY:
        k = 2 * w[None, :]
        a = widen(tl.load(x_ptr + at + k * stride_w, mask=inside, other=0.0))
        b = widen(tl.load(x_ptr + at + (k + 1) * stride_w, mask=inside & (k + 1 < K), other=0.0))
    elif KIND == WIDE:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        both = tl.load(x_ptr + at + w[None, :], mask=inside, other=0)
        a = both.to(tl.int32).to(tl.float32, bitcast=True)
        b = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        a = tl.load(x_ptr + at + w[None, :], mask=inside, other=0)
        b = a
    return a, b


@triton.jit
def low(a, KIND: tl.constexpr):
    """float32 numbers of the even columns."""
    if KIND == BF16:
        return (a << 16).to(tl.int32).to(tl.float32, bitcast=True)
    elif KIND == FP16:
        return a.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return a


@triton.jit
def high(b, KIND: tl.constexpr):
    """float32 numbers of the odd columns."""
    if KIND == BF16:
        return (b & -0x10000).to(tl.int32).to(tl.float32, bitcast=True)
    elif KIND == FP16:
        return (b >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return b


@constexpr_function
def in_pairs(KIND, INTERPRET):
    """Whether 16-bit numbers are worked on two to a word: compute capability 9.0 brought the instructions for it."""
    return BF16.value <= KIND and not INTERPRET and cuda_capability_geq(9)


@triton.jit
def larger_halves(a, b):
    """The larger of both lower and of both upper halves, unsigned."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def store_where_it_lies(ptr, value, inside, INTERPRET: tl.constexpr):
    """`tl.store` of a number of 32 bits per row, by every thread that holds it.

    The compiler would first deal them out, one to a thread: two barriers, and all warps of a program in step.
    """
    if INTERPRET:
        tl.store(ptr, value, mask=inside)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, $2; }", "=r,l,r,r",
            [ptr.to(tl.int64), value.to(tl.int32, bitcast=True), inside.to(tl.int32)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def column_amaxes(a, b, KIND: tl.constexpr, INTERPRET: tl.constexpr, LOOSE: tl.constexpr = False):
    """Bits of the largest magnitudes of even and of odd columns, [tile_W] each.

    LOOSE: gathered once more, in the order they have. The compiler would else make whatever is computed with them lie
    in the registers as they do, and turn codes by the byte.
    """
    if in_pairs(KIND, INTERPRET):
        both = tl.reduce(a & 0x7FFF7FFF, 0, larger_halves)
        if LOOSE:
            both = tl.gather(both, tl.arange(0, both.shape[0]), 0)
        return magnitude_bits(low(both, KIND)), magnitude_bits(high(both, KIND))
    even, odd = tl.max(magnitude_bits(low(a, KIND)), 0), tl.max(magnitude_bits(high(b, KIND)), 0)
    if LOOSE:
        even = tl.gather(even, tl.arange(0, even.shape[0]), 0)
        odd = tl.gather(odd, tl.arange(0, odd.shape[0]), 0)
    return even, odd


@triton.jit
def row_amaxes(a, b, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """Bits of the largest magnitudes of the tile's rows, [tile_M]."""
    if in_pairs(KIND, INTERPRET):
        both = tl.reduce(a & 0x7FFF7FFF, 1, larger_halves)
        return tl.maximum(magnitude_bits(low(both, KIND)), magnitude_bits(high(both, KIND)))
    return tl.max(tl.maximum(magnitude_bits(low(a, KIND)), magnitude_bits(high(b, KIND))), 1)


@triton.jit
def tile_amax(a, b, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """Bits of the tile's largest magnitude, a scalar."""
    if in_pairs(KIND, INTERPRET):
        both = tl.reduce(tl.reduce(a & 0x7FFF7FFF, 1, larger_halves), 0, larger_halves)
        return tl.maximum(magnitude_bits(low(both, KIND)), magnitude_bits(high(both, KIND)))
    return tl.max(row_amaxes(a, b, KIND, INTERPRET), 0)


@triton.jit
def store_plain(
    codes_ptr, a, b, inv_scale, m, w, M, K, W,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Codes of the tile into [M, K]; inv_scale [tile_M, 1] or [1, 1]."""
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    pairs = to_code_pairs(low(a, KIND) * inv_scale, high(b, KIND) * inv_scale, MANTISSA, MAX, INTERPRET)
    inside = (m[:, None] < M) & (w[None, :] < W)
    if KIND == ANY:  # K may be odd, and a row begin anywhere
        at = codes_ptr + m[:, None] * K + 2 * w[None, :]
        tl.store(at, pairs.to(tl.uint8), mask=inside)
        tl.store(at + 1, (pairs >> 8).to(tl.uint8), mask=inside & (2 * w[None, :] + 1 < K))
    else:
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(codes_ptr + m[:, None] * W + w[None, :], pairs, mask=inside)


@triton.jit
def store_turned(
    codes_ptr, a, b, inv_low, inv_high, m, w, M, K, W,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Codes of the tile into [K, M]; inv_low and inv_high, of even and odd columns, [tile_W, 1] or [1, 1].

    Words are turned before codes are made of them. Their being widened is what tells the compiler so: it changes
    layouts where a number is narrowest before it is widened, else at the end, where it would turn single bytes. Triton
    3.6 also stores the transpose of an 8-bit tile wrongly where the tile itself is stored; here no layout's codes are
    made of the other's.
    """
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    a, b = tl.trans(a), tl.trans(b)
    if KIND >= BF16:
        a = a.to(tl.int64)
        b = a
    at = codes_ptr + 2 * w[:, None] * M + m[None, :]
    inside = (m[None, :] < M) & (w[:, None] < W)
    odd = inside
    if KIND == ANY:
        odd = inside & (2 * w[:, None] + 1 < K)
    tl.store(at, to_codes(low(a, KIND) * inv_low, MANTISSA, MAX, INTERPRET), mask=inside)
    tl.store(at + M, to_codes(high(b, KIND) * inv_high, MANTISSA, MAX, INTERPRET), mask=odd)
