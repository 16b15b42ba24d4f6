"""A scale per row for one gemm, a scale per column for the other: two reads, because an amax spans the whole line.

    first      amax_M = max_k |x_mk|, amax_K = max_m |x_mk|         one atomic maximum of bits per line and tile
    second     codes_MK = cast(x_mk inv_scale_m), codes_KM = cast(x_mk inv_scale_k)

The second read goes backwards, so that it begins with what the first has left in the cache. It makes inv_scale from
amax anew in every tile: a division per line, which no other kernel has to be launched for.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import launch
from narrowgauge.compute.kernels.fused.room import facts, room
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, inv_scale_of, scale_of
from narrowgauge.compute.kernels.fused.tile import (
    SIDE,
    column_amaxes,
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
from narrowgauge.compute.quant import Scaling
from narrowgauge.formats import Format


@triton.jit
def _amaxes(
    x_ptr, row_ptr, column_ptr, M, K, W, stride_m, stride_w, KIND: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, w, _, _ = place(W, SIDE, BACKWARDS=False)
    a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
    if PLAIN:
        tl.atomic_max(row_ptr + m, row_amaxes(a, b, KIND, INTERPRET), mask=m < M, sem="relaxed")
    if TURNED:
        low, high = column_amaxes(a, b, KIND, INTERPRET)
        tl.atomic_max(column_ptr + 2 * w, low, mask=w < W, sem="relaxed")
        tl.atomic_max(column_ptr + 2 * w + 1, high, mask=2 * w + 1 < K, sem="relaxed")


@triton.jit
def _rows(
    x_ptr, row_ptr, column_ptr, plain_ptr, plain_scale_ptr, turned_ptr, turned_scale_ptr,
    M, K, W, stride_m, stride_w, KIND: tl.constexpr,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, w, tile_m, tile_w = place(W, SIDE, BACKWARDS=True)
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


def amaxes(x: Tensor, plain: bool, turned: bool) -> Tensor:
    """Bits of the amaxes of rows, then of columns, [M + K] int32; zeros for what is not asked for."""
    M, K = x.shape
    bits = torch.zeros(M + K, dtype=torch.int32, device=x.device)
    W, stride_m, stride_w, kind = words(x)
    if x.numel() and (plain or turned):
        sizes, constants = (M, K, W, stride_m, stride_w), (kind, plain, turned, INTERPRETED, SIDE)
        launch(_amaxes, tiles(M, W), (x, bits, bits[M:]), sizes, constants, num_warps=4)
    return bits


def cast_rows(
    x_MK: Tensor, fmt: Format, scaling: Scaling, margin: int = 0, *, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes [M, K] with scales [M, 1], codes [K, M] with scales [K, 1]; each pair only if asked for."""
    M, K = x_MK.shape
    codes_MK, codes_KM = room(x_MK, fmt, plain, turned)
    scale = torch.empty(M + K, device=x_MK.device)
    x, W, stride_m, stride_w, kind = even(x_MK)
    bits = amaxes(x, plain, turned)
    if x_MK.numel() and (plain or turned):
        tensors = (x, bits, bits[M:], codes_MK, scale, codes_KM, scale[M:])
        constants = (kind, *facts(fmt, scaling, margin), plain, turned, INTERPRETED, SIDE)
        launch(
            _rows, tiles(M, W), tensors, (M, K, W, stride_m, stride_w), constants,
            num_warps=4, maxnreg=registers(kind, 128),
        )  # fmt: skip
    scale_M, scale_K = scale[:M, None] if plain else None, scale[M:, None] if turned else None
    return codes_MK, scale_M, codes_KM, scale_K
