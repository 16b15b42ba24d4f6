"""A scale per row for one gemm, a scale per column for the other: two reads, because an amax spans the whole line.

    both, or columns alone
    first      amax_M = max_k |x_mk|, amax_K = max_m |x_mk|         one atomic maximum of bits per line and tile
    second     codes_MK = cast(x_mk inv_scale_m), codes_KM = cast(x_mk inv_scale_k)

    rows alone
    one read   a program holds whole rows in its registers, unless they are longer than LONGEST words

The second read goes backwards, so that it begins with what the first has left in the cache. It makes inv_scale from
amax anew in every tile: a division per line, which no other kernel has to be launched for.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Launch
from narrowgauge.compute.kernels.fused.room import facts, matrix, room
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, inv_scale_of, scale_of
from narrowgauge.compute.kernels.fused.tile import (
    SIDE,
    column_amaxes,
    copied,
    even,
    load,
    place,
    registers,
    row_amaxes,
    store_plain,
    store_turned,
    tiles,
    words,
)
from narrowgauge.compute.recipes import Operand

LONGEST, HELD = 8192, 4096  # words of a row that a program may hold, and that it should


@triton.jit
def _amaxes(
    x_ptr, row_ptr, M, K, W, stride_m, stride_w, KIND: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, w, _, _ = place(W, SIDE, BACKWARDS=False)
    column_ptr = row_ptr + M
    a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
    if PLAIN:
        tl.atomic_max(row_ptr + m, row_amaxes(a, b, KIND, INTERPRET), mask=m < M, sem="relaxed")
    if TURNED:
        low, high = column_amaxes(a, b, KIND, INTERPRET)
        tl.atomic_max(column_ptr + 2 * w, low, mask=w < W, sem="relaxed")
        tl.atomic_max(column_ptr + 2 * w + 1, high, mask=2 * w + 1 < K, sem="relaxed")


@triton.jit
def _rows(
    x_ptr, row_ptr, plain_ptr, plain_scale_ptr, turned_ptr, turned_scale_ptr,
    M, K, W, stride_m, stride_w, KIND: tl.constexpr,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, w, tile_m, tile_w = place(W, SIDE, BACKWARDS=True)
    column_ptr = row_ptr + M
    if PLAIN:
        amax = tl.load(row_ptr + m, mask=m < M, other=0).to(tl.float32, bitcast=True)
        inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
        if tile_w == 0:
            tl.store(plain_scale_ptr + m, scale_of(amax, inv_scale, POW2), mask=m < M)
    if TURNED:
        odd = 2 * w + 1 < K
        amax_low = tl.load(column_ptr + 2 * w, mask=w < W, other=0).to(tl.float32, bitcast=True)
        amax_high = tl.load(column_ptr + 2 * w + 1, mask=odd, other=0).to(tl.float32, bitcast=True)
        inv_low = inv_scale_of(amax_low, GOAL, POW2, FLOOR)
        inv_high = inv_scale_of(amax_high, GOAL, POW2, FLOOR)
        if tile_m == 0:
            tl.store(turned_scale_ptr + 2 * w, scale_of(amax_low, inv_low, POW2), mask=w < W)
            tl.store(turned_scale_ptr + 2 * w + 1, scale_of(amax_high, inv_high, POW2), mask=odd)
    a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
    if PLAIN:
        store_plain(plain_ptr, a, b, inv_scale[:, None], m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
    if TURNED:
        low, high = inv_low[:, None], inv_high[:, None]
        store_turned(turned_ptr, a, b, low, high, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)


@triton.jit
def _whole_rows(
    x_ptr, plain_ptr, scale_ptr, M, K, W, stride_m, stride_w, KIND: tl.constexpr,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr,
    INTERPRET: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # backwards, as `place` says
    m = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, WORDS).to(tl.int64)
    a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
    amax = row_amaxes(a, b, KIND, INTERPRET).to(tl.float32, bitcast=True)
    inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
    tl.store(scale_ptr + m, scale_of(amax, inv_scale, POW2), mask=m < M)
    store_plain(plain_ptr, a, b, inv_scale[:, None], m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)


class Amaxes:
    """The amaxes of rows and columns of all matrices that lie in memory as `x_MK` does."""

    def __init__(self, x_MK: Tensor, plain: bool, turned: bool) -> None:
        M, K = x_MK.shape
        W, stride_m, stride_w, kind = words(x_MK)
        self._numbers = M + K
        self._launch = Launch(
            _amaxes, tiles(M, W), (M, K, W, stride_m, stride_w), (kind, plain, turned, INTERPRETED, SIDE), num_warps=4
        )

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Bits of the amaxes of rows, then of columns, [M + K] int32; zeros for what was not asked for."""
        bits = torch.zeros(self._numbers, dtype=torch.int32, device=x_MK.device)
        self._launch((x_MK, bits))
        return bits


class RowCast:
    """`cast_rows` of all matrices that lie in memory as `x_MK` does: what follows from that is found once."""

    def __init__(self, x_MK: Tensor, rule: Operand, plain: bool, turned: bool) -> None:
        M, K = x_MK.shape
        x, W, stride_m, stride_w, kind = even(x_MK)
        self._rule, self._plain, self._turned, self._copies = rule, plain, turned, x is not x_MK
        sizes, known = (M, K, W, stride_m, stride_w), (kind, *facts(rule.fmt, rule.scaling, rule.margin))
        self._amaxes: Amaxes | None = None
        if not turned and kind and W <= LONGEST:
            words, rows, warps = whole(W, HELD, 1024)
            self._cast = Launch(
                _whole_rows, triton.cdiv(M, rows), sizes, (*known, INTERPRETED, rows, words), num_warps=warps
            )
            return
        self._amaxes = Amaxes(x, plain, turned)
        constants = (*known, plain, turned, INTERPRETED, SIDE)
        self._cast = Launch(_rows, tiles(M, W), sizes, constants, num_warps=4, maxnreg=registers(kind, 128))

    def __call__(self, x_MK: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Codes [M, K] with scales [M, 1], codes [K, M] with scales [K, 1]; each pair only if asked for."""
        M, K = x_MK.shape
        codes_MK, codes_KM = room(x_MK, self._rule.fmt, self._plain, self._turned)
        scale_M = matrix(M, 1, x_MK) if self._plain else None
        scale_K = matrix(K, 1, x_MK) if self._turned else None
        if x_MK.numel() and (self._plain or self._turned):
            x = copied(x_MK) if self._copies else x_MK
            if self._amaxes is None:
                self._cast((x, codes_MK, scale_M))
            else:
                self._cast((x, self._amaxes(x), codes_MK, scale_M, codes_KM, scale_K))
        return codes_MK, scale_M, codes_KM, scale_K


def whole(W: int, held: int, per_warp: int) -> tuple[int, int, int]:
    """Words of a row that a program holds, how many such rows, and how many warps share them.

    That is one row, or `held` words of more; a warp takes `per_warp` of them.
    """
    words: int = triton.next_power_of_2(max(W, 16))
    rows = max(1, held // words)
    return words, rows, words * rows // per_warp


def cast_rows(
    x_MK: Tensor, rule: Operand, *, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes [M, K] with scales [M, 1], codes [K, M] with scales [K, 1]; each pair only if asked for."""
    return RowCast(x_MK, rule, plain, turned)(x_MK)
