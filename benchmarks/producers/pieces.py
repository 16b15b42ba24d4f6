"""What kernels share that compute a tensor and quantize it before it leaves the chip.

    y  = f(inputs)                        float32 inside, rounded once to bfloat16: what a compiler makes of BF16 code
    given a scale                         codes of y in both layouts and its amax; y itself is written only if asked for
    no scale yet                          y and its amax, for a cast that follows

Eager torch rounds after every operation, silu and product each; a compiler that merges them keeps float32 and rounds
what it stores. That is the meaning here too. Codes are those of the rounded y, so they are what the reference quantizer
makes of the y that these kernels write, bit for bit.

Two neighbours along K share a word from the load to the codes, as in `tile`: K is even, or it is an error.

Legend: M = rows, K = columns of y, W = K / 2 words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.both import Given
from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.tile import BF16, even, store_plain, store_turned
from narrowgauge.compute.quant import torch_dtype
from narrowgauge.compute.recipes import Operand
from narrowgauge.errors import ShapeError

# PTX: 1 / (1 + 2^(-x log2 e)). Below -87.3 the reciprocal is flushed to 0; it would be 2^-126 or less.
_SIGMOID = (
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; "
    "add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"
)
_SIGMOID_ASM = Constant(_SIGMOID)


class Launch(NamedTuple):
    """A tile's rows and columns, and the warps and registers of the program that makes it."""

    rows: int
    columns: int
    warps: int
    registers: int | None


class Made(NamedTuple):
    """Codes [M, K] and [K, M], the scale [] that tells of them, the amax [] of y, and y in bfloat16.

    Codes and scale as of `tensorwise.cast_given`. What was not asked for is None.
    """

    plain: Tensor | None
    turned: Tensor | None
    scale: Tensor | None
    amax: Tensor
    high: Tensor | None


class Room:
    """Where a producer of y [M, K] writes, and what it reads of a given scale; no scale, no codes."""

    def __init__(
        self,
        M: int,
        K: int,
        x: Tensor,
        rule: Operand | None,
        given: Given | None,
        plain: bool,
        turned: bool,
        high: bool,
    ) -> None:
        device, self.rule = x.device, rule
        dtype = None if rule is None else torch_dtype(rule.fmt)
        self.plain = torch.empty(M, K, dtype=dtype, device=device) if plain and given else None
        self.turned = torch.empty(K, M, dtype=dtype, device=device) if turned and given else None
        self.high = torch.empty(M, K, dtype=torch.bfloat16, device=device) if high else None
        self.out = torch.empty(2, device=device)  # amax, scale
        scratch = None if given is None else given.scratch
        self.scratch = torch.zeros(2, dtype=torch.int32, device=device) if scratch is None else scratch
        self.scale = None if given is None else given.scale
        self.inv_scale = None if given is None else given.inv_scale
        slot = None if given is None or not M * K else given.slot  # nothing leaves no trace
        self.slot = None if slot is None else slot.view(torch.int32)

    @property
    def facts(self) -> tuple[int, float, bool, bool, bool, bool, bool]:
        """Mantissa bits and largest number of the format; is there a scale, and what is wanted of what."""
        mantissa, largest = (0, 0.0) if self.rule is None else (self.rule.fmt.mantissa_bits, self.rule.fmt.max)
        wanted = (self.high is not None, self.plain is not None, self.turned is not None, self.slot is not None)
        return mantissa, largest, self.scale is not None, *wanted

    def made(self) -> Made:
        """What was written."""
        if self.rule is None:
            return Made(None, None, None, self.out[0], self.high)
        return Made(self.plain, self.turned, self.out[1], self.out[0], self.high)


def in_words(x_MK: Tensor, what: str, parts: int = 1) -> Tensor:
    """x_MK, copied if it does not lie in words of two neighbours; an error if it or a part of it could not."""
    if x_MK.dim() != 2 or x_MK.dtype != torch.bfloat16 or x_MK.shape[1] % (2 * parts):
        shape = ", ".join(str(n) for n in x_MK.shape)
        raise ShapeError(
            f"{what} is {x_MK.dtype} [{shape}]; it must be torch.bfloat16 with two dimensions, the last of them a "
            f"multiple of {2 * parts}: flatten leading dimensions, and quantize other tensors with the ordinary cast."
        )
    return even(x_MK)[0]


@triton.jit
def place(program, W, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Row and word indices of a program's tile, int64; neighbours along K run together, the last first."""
    program = (tl.num_programs(0) - 1 - program).to(tl.uint32)
    tiles_w = tl.maximum((W + (WORDS - 1)) // WORDS, 1).to(tl.uint32)
    m = (program // tiles_w).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = (program % tiles_w).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    return m, w


@triton.jit
def sigmoid(x, INTERPRET: tl.constexpr):
    """1 / (1 + e^-x) of float32, to a few units in the last place: two instructions that approximate."""
    if INTERPRET:
        return 1.0 / (1.0 + tl.exp(-x))
    return tl.inline_asm_elementwise(_SIGMOID_ASM, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def to_words(low, high, INTERPRET: tl.constexpr):
    """Two float32 numbers, each rounded to bfloat16, as one word."""
    if INTERPRET:
        return _rounded(low) | (_rounded(high) << 16)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _rounded(x):
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(x != x, 0x7FC0, nearest)


@triton.jit
def read_given(scale_ptr, inv_scale_ptr, CODES: tl.constexpr):
    """What to multiply with and the scale that tells of it: 1 and NaN where the given one is no positive number."""
    if CODES:
        scale = tl.load(scale_ptr)
        usable = (scale > 0) & (scale < float("inf"))
        return tl.where(usable, tl.load(inv_scale_ptr), 1.0), tl.where(usable, scale, float("nan"))
    else:
        return 1.0, 1.0


@triton.jit
def count_in(bits, scratch_ptr):
    """Join a program's amax to the others', and say how many have done so before."""
    tl.atomic_max(scratch_ptr, bits, sem="relaxed")
    return tl.atomic_add(scratch_ptr + 1, 1, sem="release")


@triton.jit
def publish(before, scale, out_ptr, slot_ptr, scratch_ptr, CODES: tl.constexpr, SLOT: tl.constexpr):
    """Who counted in last writes the amax and the scale, and leaves zeros in the scratch."""
    if before == tl.num_programs(0) - 1:
        tl.atomic_xchg(scratch_ptr + 1, 0, sem="acquire")  # after what all others released
        bits = tl.atomic_xchg(scratch_ptr, 0, sem="relaxed")
        amax = bits.to(tl.float32, bitcast=True)
        tl.store(out_ptr, amax)
        if CODES:
            tl.store(out_ptr + 1, tl.where(amax < float("inf"), scale, float("nan")))
        if SLOT:
            tl.atomic_max(slot_ptr, bits, mask=amax < float("inf"), sem="relaxed")


@triton.jit
def write(
    y, inv_scale, rows, m, w, N, M, W, high_ptr, plain_ptr, turned_ptr, HIGH: tl.constexpr, PLAIN: tl.constexpr,
    TURNED: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Words y of columns w: as they are and as codes into `rows` of [N, 2W], as codes into columns m of [2W, M]."""
    if HIGH:
        high_ptr = high_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(high_ptr + rows[:, None] * W + w[None, :], y, mask=(rows[:, None] < N) & (w[None, :] < W))
    if PLAIN:
        store_plain(plain_ptr, y, y, inv_scale, rows, w, N, 2 * W, W, BF16, MANTISSA, MAX, INTERPRET)
    if TURNED:
        store_turned(turned_ptr, y, y, inv_scale, inv_scale, m, w, M, 2 * W, W, BF16, MANTISSA, MAX, INTERPRET)
