"""One scale per tensor: codes in both layouts from one read.

    codes_MK = cast(x_MK * inv_scale)         codes_KM = the same, transposed in the tile

A gemm reads both operands along the contracted dimension, so a tensor that serves two gemms is needed twice. Reading
it once saves a third of the traffic: 2 + 1 + 1 bytes per element instead of 2 + 1 + 1 + 1 read back.

    cast          the scale comes of the tensor's own amax, which is known: every program divides for itself
    cast_given    the scale is given, and the amax found on the way for the scales to come

Programs of cast_given join their amaxes by an atomic maximum of bits, then count themselves; who counts last knows all.
It counts before it writes its codes, so that none waits for memory on that account.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Launch
from narrowgauge.compute.kernels.fused.room import facts, number, room
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, inv_scale_of, scale_of
from narrowgauge.compute.kernels.fused.tile import (
    SIDE,
    copied,
    even,
    load,
    place,
    registers,
    store_plain,
    store_turned,
    tile_amax,
    tiles,
)
from narrowgauge.compute.recipes import Operand

# Where in its table a row lies is no reason to compile again.
ROWS_OF_A_TABLE = ["given_ptr", "inv_scale_ptr", "scale_ptr", "amax_ptr", "slot_ptr", "scratch_ptr"]


@triton.jit
def _cast(
    x_ptr, amax_ptr, plain_ptr, turned_ptr, scale_ptr, M, K, W, stride_m, stride_w, KIND: tl.constexpr,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, w, tile_m, tile_w = place(W, SIDE, BACKWARDS=True)
    amax = tl.load(amax_ptr + tl.arange(0, 1))
    inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
    if (tile_m == 0) & (tile_w == 0):
        tl.store(scale_ptr + tl.arange(0, 1), scale_of(amax, inv_scale, POW2))
    a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
    inv = inv_scale[:, None]
    if PLAIN:
        store_plain(plain_ptr, a, b, inv, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
    if TURNED:
        store_turned(turned_ptr, a, b, inv, inv, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)


@triton.jit(do_not_specialize_on_alignment=ROWS_OF_A_TABLE)
def _cast_given(
    x_ptr, given_ptr, inv_scale_ptr, plain_ptr, turned_ptr, scale_ptr, amax_ptr, slot_ptr, scratch_ptr,
    M, K, W, stride_m, stride_w, KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, SLOT: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, w, _, _ = place(W, SIDE, BACKWARDS=True)
    a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
    if SLOT:
        slot_ptr = slot_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    given = tl.load(given_ptr)
    usable = (given > 0) & (given < float("inf"))
    inv_scale = tl.where(usable, tl.load(inv_scale_ptr), 1.0)
    tl.atomic_max(scratch_ptr, tile_amax(a, b, KIND, INTERPRET), sem="relaxed")
    before = tl.atomic_add(scratch_ptr + 1, 1, sem="release")
    if PLAIN:
        store_plain(plain_ptr, a, b, inv_scale, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
    if TURNED:
        store_turned(turned_ptr, a, b, inv_scale, inv_scale, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
    if before == tl.num_programs(0) - 1:
        tl.atomic_xchg(scratch_ptr + 1, 0, sem="acquire")  # after what all others released
        bits = tl.atomic_xchg(scratch_ptr, 0, sem="relaxed")
        amax = bits.to(tl.float32, bitcast=True)
        tl.store(amax_ptr, amax)
        tl.store(scale_ptr, tl.where(usable & (amax < float("inf")), given, float("nan")))
        if SLOT:
            tl.atomic_max(slot_ptr, bits, mask=amax < float("inf"), sem="relaxed")


class _TensorCast:
    """What follows from shape, strides and rule, found once for all matrices that lie in memory as `x_MK` does."""

    def __init__(self, x_MK: Tensor, rule: Operand, plain: bool, turned: bool) -> None:
        M, K = x_MK.shape
        x, W, stride_m, stride_w, self._kind = even(x_MK)
        self._fmt, self._plain, self._turned, self._copies = rule.fmt, plain, turned, x is not x_MK
        self._programs, self._sizes = tiles(M, W), (M, K, W, stride_m, stride_w)

    def _words(self, x_MK: Tensor) -> Tensor:
        return copied(x_MK) if self._copies else x_MK


class Cast(_TensorCast):
    """`cast` of all matrices that lie in memory as `x_MK` does."""

    def __init__(self, x_MK: Tensor, rule: Operand, plain: bool, turned: bool) -> None:
        super().__init__(x_MK, rule, plain, turned)
        constants = (self._kind, *facts(rule.fmt, rule.scaling, rule.margin), plain, turned, INTERPRETED, SIDE)
        self._launch = Launch(_cast, self._programs, self._sizes, constants, num_warps=8)

    def __call__(self, x_MK: Tensor, amax: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Codes of x_MK as [M, K] and as [K, M], each only if asked for, and their scale [], by its amax [] float32."""
        codes_MK, codes_KM = room(x_MK, self._fmt, self._plain, self._turned)
        scale = number(x_MK)
        self._launch((self._words(x_MK), amax, codes_MK, codes_KM, scale))
        return codes_MK, codes_KM, scale


class CastGiven(_TensorCast):
    """`cast_given` of all matrices that lie in memory as `x_MK` does; `seen`: whether a slot is to hear of it."""

    def __init__(self, x_MK: Tensor, rule: Operand, plain: bool, turned: bool, seen: bool) -> None:
        super().__init__(x_MK, rule, plain, turned)
        seen = seen and x_MK.numel() > 0  # nothing leaves no trace
        constants = (self._kind, rule.fmt.mantissa_bits, rule.fmt.max, plain, turned, seen, INTERPRETED, SIDE)
        both = plain and turned
        self._launch = Launch(
            _cast_given, self._programs, self._sizes, constants,
            num_warps=4 if both else 8, maxnreg=registers(self._kind, 128 if both else 64),
        )  # fmt: skip

    def __call__(
        self, x_MK: Tensor, scale: Tensor, inv_scale: Tensor, slot: Tensor | None, scratch: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
        """As `cast_given`."""
        codes_MK, codes_KM = room(x_MK, self._fmt, self._plain, self._turned)
        own, amax = number(x_MK), number(x_MK)
        if scratch is None:
            scratch = torch.zeros(2, dtype=torch.int32, device=x_MK.device)
        self._launch((self._words(x_MK), scale, inv_scale, codes_MK, codes_KM, own, amax, slot, scratch))
        return codes_MK, codes_KM, own, amax


def cast(
    x_MK: Tensor, rule: Operand, amax: Tensor, *, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Codes of x_MK as [M, K] and as [K, M], each only if asked for, and their scale [], by its amax [] float32.

    x_MK may have any strides and any float dtype of 32 bits or fewer.
    """
    return Cast(x_MK, rule, plain, turned)(x_MK, amax)


def cast_given(
    x_MK: Tensor,
    rule: Operand,
    scale: Tensor,
    inv_scale: Tensor,
    *,
    plain: bool = True,
    turned: bool = True,
    slot: Tensor | None = None,
    scratch: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Codes of x_MK under a given scale, the scale that tells of them, and the amax of x_MK, in one launch.

    Args:
        x_MK: as for `cast`.
        rule: its format counts.
        scale, inv_scale: [] float32 each. Codes are made with inv_scale, or with 1 where scale is no positive number.
        plain, turned: which layouts to write.
        slot: float32 [1], at first negative: raised to amax, if that is finite.
        scratch: int32 [2], zeros, which it holds again afterwards; calls on one stream may share it.

    Returns:
        Codes [M, K]; codes [K, M]; scale [], NaN where amax is not finite or the given one no positive number; amax [].
    """
    return CastGiven(x_MK, rule, plain, turned, slot is not None)(x_MK, scale, inv_scale, slot, scratch)
