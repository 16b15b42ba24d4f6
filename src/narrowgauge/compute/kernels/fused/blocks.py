"""Scales per block, both layouts from one read: a tile is a block, so its amaxes never leave the chip.

    tiles      plain   amax along K of each row of the tile      [M, K/128]        codes_MK
               turned  amax along M of each column of the tile   [K, M/128]        codes_KM
    squares    one amax per tile, one copy of codes in both layouts [M/128, K/128]

The scales of `tiles` are stored as the gemm reads them: outer dimension contiguous, strides (1, M) and (1, K).

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Launch
from narrowgauge.compute.kernels.fused.room import facts, matrix, room, turned_matrix
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
    store_where_it_lies,
    tile_amax,
    tiles,
)
from narrowgauge.compute.recipes import Operand


@triton.jit
def _tiles(
    x_ptr, plain_ptr, plain_scale_ptr, turned_ptr, turned_scale_ptr, M, K, W, stride_m, stride_w, KIND: tl.constexpr,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, w, tile_m, tile_w = place(W, SIDE, BACKWARDS=True)
    a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
    if TURNED:  # before x is widened for the plain codes, which takes registers
        low, high = column_amaxes(a, b, KIND, INTERPRET, LOOSE=True)
        amax_low, amax_high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    if PLAIN:
        amax = row_amaxes(a, b, KIND, INTERPRET).to(tl.float32, bitcast=True)
        inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
        store_where_it_lies(plain_scale_ptr + tile_w * M + m, scale_of(amax, inv_scale, POW2), m < M, INTERPRET)
        store_plain(plain_ptr, a, b, inv_scale[:, None], m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
    if TURNED:
        inv_low = inv_scale_of(amax_low, GOAL, POW2, FLOOR)
        inv_high = inv_scale_of(amax_high, GOAL, POW2, FLOOR)
        at = turned_scale_ptr + tile_m * K + 2 * w
        tl.store(at, scale_of(amax_low, inv_low, POW2), mask=w < W)
        tl.store(at + 1, scale_of(amax_high, inv_high, POW2), mask=2 * w + 1 < K)
        low, high = inv_low[:, None], inv_high[:, None]
        store_turned(turned_ptr, a, b, low, high, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)


@triton.jit
def _squares(
    x_ptr, plain_ptr, turned_ptr, scale_ptr, M, K, W, stride_m, stride_w, KIND: tl.constexpr,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, w, tile_m, tile_w = place(W, SIDE, BACKWARDS=True)
    a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
    bits = tl.full((1,), 0, tl.int32) + tile_amax(a, b, KIND, INTERPRET)
    amax = bits.to(tl.float32, bitcast=True)
    inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
    at = tile_m * tl.cdiv(2 * W, SIDE) + tile_w + tl.arange(0, 1)
    tl.store(scale_ptr + at, scale_of(amax, inv_scale, POW2))
    inv = inv_scale[:, None]
    if PLAIN:
        store_plain(plain_ptr, a, b, inv, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
    if TURNED:
        store_turned(turned_ptr, a, b, inv, inv, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)


class BlockCast:
    """A cast by blocks of all matrices that lie in memory as `x_MK` does: what follows from that is found once."""

    def __init__(self, kernel: Any, x_MK: Tensor, rule: Operand, plain: bool, turned: bool) -> None:
        M, K = x_MK.shape
        x, W, stride_m, stride_w, kind = even(x_MK)
        self._fmt, self._plain, self._turned, self._copies = rule.fmt, plain, turned, x is not x_MK
        self._blocks_M, self._blocks_K = triton.cdiv(M, SIDE), triton.cdiv(K, SIDE)
        constants = (kind, *facts(rule.fmt, rule.scaling, rule.margin), plain, turned, INTERPRETED, SIDE)
        self._launch = Launch(
            kernel, tiles(M, W), (M, K, W, stride_m, stride_w), constants, num_warps=8, maxnreg=registers(kind, 64)
        )

    def _words(self, x_MK: Tensor) -> Tensor:
        return copied(x_MK) if self._copies else x_MK


class TileCast(BlockCast):
    """`cast_tiles` of all matrices that lie in memory as `x_MK` does."""

    def __init__(self, x_MK: Tensor, rule: Operand, plain: bool, turned: bool) -> None:
        super().__init__(_tiles, x_MK, rule, plain, turned)

    def __call__(self, x_MK: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Codes [M, K] with scales [M, K/128], codes [K, M] with scales [K, M/128]; each pair only if asked for."""
        M, K = x_MK.shape
        codes_MK, codes_KM = room(x_MK, self._fmt, self._plain, self._turned)
        scale_M = turned_matrix(M, self._blocks_K, x_MK) if self._plain else None
        scale_K = turned_matrix(K, self._blocks_M, x_MK) if self._turned else None
        if x_MK.numel() and (self._plain or self._turned):
            self._launch((self._words(x_MK), codes_MK, scale_M, codes_KM, scale_K))
        return codes_MK, scale_M, codes_KM, scale_K


class SquareCast(BlockCast):
    """`cast_squares` of all matrices that lie in memory as `x_MK` does."""

    def __init__(self, x_MK: Tensor, rule: Operand, plain: bool, turned: bool) -> None:
        super().__init__(_squares, x_MK, rule, plain, turned)

    def __call__(self, x_MK: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Codes [M, K] and [K, M], each only if asked for, and their scales [M/128, K/128]."""
        codes_MK, codes_KM = room(x_MK, self._fmt, self._plain, self._turned)
        scale = matrix(self._blocks_M, self._blocks_K, x_MK)
        if x_MK.numel():
            self._launch((self._words(x_MK), codes_MK, codes_KM, scale))
        return codes_MK, codes_KM, scale


def cast_tiles(
    x_MK: Tensor, rule: Operand, *, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes [M, K] with scales [M, K/128], codes [K, M] with scales [K, M/128]; each pair only if asked for."""
    return TileCast(x_MK, rule, plain, turned)(x_MK)


def cast_squares(
    x_MK: Tensor, rule: Operand, *, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Codes [M, K] and [K, M], each only if asked for, and their scales [M/128, K/128]."""
    return SquareCast(x_MK, rule, plain, turned)(x_MK)
