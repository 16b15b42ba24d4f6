"""One scale per tensor: codes in both layouts from one read.

    codes_MK = cast(x_MK * inv_scale)         codes_KM = the same bytes, transposed in the tile

A gemm reads both operands along the contracted dimension, so a tensor that serves two gemms is needed twice. Reading
it once saves a third of the traffic: 2 + 1 + 1 bytes per element instead of 2 + 1 + 1 + 1 read back.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.room import as_codes, room
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, apart, to_codes, widen
from narrowgauge.formats import Format

TILE_M, TILE_K = 64, 128


@triton.jit
def _cast(
    x_ptr, inv_scale_ptr, plain_ptr, turned_ptr, M, K, stride_m, stride_k,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    k = (tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)).to(tl.int64)
    inside = (m[:, None] < M) & (k[None, :] < K)
    x = widen(tl.load(x_ptr + m[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0.0))
    inv_scale = tl.load(inv_scale_ptr)
    if PLAIN:
        codes = to_codes(x * inv_scale, MANTISSA, MAX, INTERPRET)
        tl.store(plain_ptr + m[:, None] * K + k[None, :], codes, mask=inside)
    if TURNED:
        codes = to_codes(x * apart(inv_scale, INTERPRET), MANTISSA, MAX, INTERPRET)
        tl.store(turned_ptr + k[:, None] * M + m[None, :], tl.trans(codes), mask=tl.trans(inside))


def cast(
    x_MK: Tensor, inv_scale: Tensor, fmt: Format, *, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Codes of x_MK under one inv_scale [], as [M, K] and as [K, M], each only if asked for.

    x_MK may have any strides and any float dtype of 32 bits or fewer.
    """
    M, K = x_MK.shape
    codes_MK, codes_KM = room(x_MK, plain, turned)
    if x_MK.numel() and (plain or turned):
        grid = (triton.cdiv(M, TILE_M), triton.cdiv(K, TILE_K))
        _cast[grid](
            x_MK, inv_scale, codes_MK, codes_KM, M, K, *x_MK.stride(),
            fmt.mantissa_bits, fmt.max, plain, turned, INTERPRETED, TILE_M, TILE_K, num_warps=4,
        )  # fmt: skip
    return as_codes(codes_MK, fmt), as_codes(codes_KM, fmt)
