"""A scale per row for one gemm, a scale per column for the other: two reads, because an amax spans the whole line.

    first      amax_M = max_k |x_mk|, amax_K = max_m |x_mk|         one atomic maximum of bits per line and tile
    second     codes_MK = cast(x_mk inv_scale_m), codes_KM = cast(x_mk inv_scale_k)

The second read makes inv_scale from amax anew in every tile: a division per line, which no other kernel has to be
launched for.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.blocks import _load
from narrowgauge.compute.kernels.fused.room import as_codes, facts, room
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, inv_scale_of, magnitude_bits, scale_of, to_codes
from narrowgauge.compute.quant import Scaling
from narrowgauge.formats import Format

TILE = 128


@triton.jit
def _amaxes(
    x_ptr, row_ptr, column_ptr, M, K, stride_m, stride_k, PLAIN: tl.constexpr, TURNED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    m, k, _, x = _load(x_ptr, M, K, stride_m, stride_k, TILE)
    bits = magnitude_bits(x)
    if PLAIN:
        tl.atomic_max(row_ptr + m, tl.max(bits, 1), mask=m < M)
    if TURNED:
        tl.atomic_max(column_ptr + k, tl.max(bits, 0), mask=k < K)


@triton.jit
def _rows(
    x_ptr, row_ptr, column_ptr, plain_ptr, plain_scale_ptr, turned_ptr, turned_scale_ptr, M, K, stride_m, stride_k,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    m, k, inside, x = _load(x_ptr, M, K, stride_m, stride_k, TILE)
    if PLAIN:
        amax = tl.load(row_ptr + m, mask=m < M, other=0).to(tl.float32, bitcast=True)
        inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
        if tl.program_id(1) == 0:
            tl.store(plain_scale_ptr + m, scale_of(amax, inv_scale), mask=m < M)
        codes = to_codes(x * inv_scale[:, None], MANTISSA, MAX, INTERPRET)
        tl.store(plain_ptr + m[:, None] * K + k[None, :], codes, mask=inside)
    if TURNED:
        amax = tl.load(column_ptr + k, mask=k < K, other=0).to(tl.float32, bitcast=True)
        inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
        if tl.program_id(0) == 0:
            tl.store(turned_scale_ptr + k, scale_of(amax, inv_scale), mask=k < K)
        codes = to_codes(x * inv_scale[None, :], MANTISSA, MAX, INTERPRET)
        tl.store(turned_ptr + k[:, None] * M + m[None, :], tl.trans(codes), mask=tl.trans(inside))


def cast_rows(
    x_MK: Tensor, fmt: Format, scaling: Scaling, margin: int = 0, *, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes [M, K] with scales [M, 1], codes [K, M] with scales [K, 1]; each pair only if asked for."""
    M, K = x_MK.shape
    codes_MK, codes_KM = room(x_MK, plain, turned)
    bits = torch.zeros(M + K, dtype=torch.int32, device=x_MK.device)
    scale = torch.empty(M + K, device=x_MK.device)
    grid = (triton.cdiv(M, TILE), triton.cdiv(K, TILE))
    if x_MK.numel() and (plain or turned):
        _amaxes[grid](x_MK, bits, bits[M:], M, K, *x_MK.stride(), plain, turned, TILE, num_warps=8)
        _rows[grid](
            x_MK, bits, bits[M:], codes_MK, scale, codes_KM, scale[M:], M, K, *x_MK.stride(),
            *facts(fmt, scaling, margin), plain, turned, INTERPRETED, TILE, num_warps=8,
        )  # fmt: skip
    scale_M, scale_K = scale[:M, None] if plain else None, scale[M:, None] if turned else None
    return as_codes(codes_MK, fmt), scale_M, as_codes(codes_KM, fmt), scale_K
