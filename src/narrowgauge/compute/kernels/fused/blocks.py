"""Scales per block, both layouts from one read: a tile is a block, so its amaxes never leave the chip.

    tiles      plain   amax along K of each row of the tile      [M, K/128]        codes_MK
               turned  amax along M of each column of the tile   [K, M/128]        codes_KM
    squares    one amax per tile, one copy of codes in both layouts [M/128, K/128]

The scales of `tiles` are stored as the gemm reads them: outer dimension contiguous, strides (1, M) and (1, K).

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.room import as_codes, facts, room
from narrowgauge.compute.kernels.fused.rules import (
    INTERPRETED,
    apart,
    inv_scale_of,
    magnitude_bits,
    scale_of,
    to_codes,
    widen,
)
from narrowgauge.compute.quant import Scaling
from narrowgauge.formats import Format

SIDE = 128


@triton.jit
def _load(x_ptr, M, K, stride_m, stride_k, SIDE: tl.constexpr):
    m = (tl.program_id(0) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    k = (tl.program_id(1) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    inside = (m[:, None] < M) & (k[None, :] < K)
    x = widen(tl.load(x_ptr + m[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0.0))
    return m, k, inside, x


@triton.jit
def _tiles(
    x_ptr, plain_ptr, plain_scale_ptr, turned_ptr, turned_scale_ptr, M, K, stride_m, stride_k,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, k, inside, x = _load(x_ptr, M, K, stride_m, stride_k, SIDE)
    bits = magnitude_bits(x)
    if PLAIN:
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
        inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
        tl.store(plain_scale_ptr + tl.program_id(1).to(tl.int64) * M + m, scale_of(amax, inv_scale), mask=m < M)
        codes = to_codes(x * inv_scale[:, None], MANTISSA, MAX, INTERPRET)
        tl.store(plain_ptr + m[:, None] * K + k[None, :], codes, mask=inside)
    if TURNED:
        amax = tl.max(bits, 0).to(tl.float32, bitcast=True)
        inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
        tl.store(turned_scale_ptr + tl.program_id(0).to(tl.int64) * K + k, scale_of(amax, inv_scale), mask=k < K)
        codes = to_codes(x * inv_scale[None, :], MANTISSA, MAX, INTERPRET)
        tl.store(turned_ptr + k[:, None] * M + m[None, :], tl.trans(codes), mask=tl.trans(inside))


@triton.jit
def _squares(
    x_ptr, plain_ptr, turned_ptr, scale_ptr, M, K, stride_m, stride_k,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, k, inside, x = _load(x_ptr, M, K, stride_m, stride_k, SIDE)
    amax = tl.max(tl.max(magnitude_bits(x), 1), 0).to(tl.float32, bitcast=True)
    amax = tl.full((1,), 1.0, tl.float32) * amax
    inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1) + tl.arange(0, 1)
    tl.store(scale_ptr + at, scale_of(amax, inv_scale))
    if PLAIN:
        codes = to_codes(x * inv_scale[:, None], MANTISSA, MAX, INTERPRET)
        tl.store(plain_ptr + m[:, None] * K + k[None, :], codes, mask=inside)
    if TURNED:
        codes = to_codes(x * apart(inv_scale, INTERPRET)[:, None], MANTISSA, MAX, INTERPRET)
        tl.store(turned_ptr + k[:, None] * M + m[None, :], tl.trans(codes), mask=tl.trans(inside))


def cast_tiles(
    x_MK: Tensor, fmt: Format, scaling: Scaling, margin: int = 0, *, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes [M, K] with scales [M, K/128], codes [K, M] with scales [K, M/128]; each pair only if asked for."""
    M, K = x_MK.shape
    rows, columns = triton.cdiv(M, SIDE), triton.cdiv(K, SIDE)
    codes_MK, codes_KM = room(x_MK, plain, turned)
    scale_M = torch.empty(columns, M, device=x_MK.device).t() if plain else None
    scale_K = torch.empty(rows, K, device=x_MK.device).t() if turned else None
    if x_MK.numel() and (plain or turned):
        _tiles[(rows, columns)](
            x_MK, codes_MK, scale_M, codes_KM, scale_K, M, K, *x_MK.stride(),
            *facts(fmt, scaling, margin), plain, turned, INTERPRETED, SIDE, num_warps=8,
        )  # fmt: skip
    return as_codes(codes_MK, fmt), scale_M, as_codes(codes_KM, fmt), scale_K


def cast_squares(
    x_MK: Tensor, fmt: Format, scaling: Scaling, margin: int = 0, *, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Codes [M, K] and [K, M], each only if asked for, and their scales [M/128, K/128]."""
    M, K = x_MK.shape
    rows, columns = triton.cdiv(M, SIDE), triton.cdiv(K, SIDE)
    codes_MK, codes_KM = room(x_MK, plain, turned)
    scale = torch.empty(rows, columns, device=x_MK.device)
    if x_MK.numel():
        _squares[(rows, columns)](
            x_MK, codes_MK, codes_KM, scale, M, K, *x_MK.stride(),
            *facts(fmt, scaling, margin), plain, turned, INTERPRETED, SIDE, num_warps=8,
        )  # fmt: skip
    return as_codes(codes_MK, fmt), as_codes(codes_KM, fmt), scale
