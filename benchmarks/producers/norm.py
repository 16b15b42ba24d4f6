"""RMSNorm, quantized before it leaves the chip.

    rstd_m = 1 / sqrt(mean_k x_mk^2 + eps)          y_mk = x_mk rstd_m weight_k

Everything in float32; y is rounded once, to bfloat16, as a compiler does that merges the norm.

rstd needs the whole row, and codes along M need many rows at once: more numbers than registers hold. So a program goes
over its rows twice, forwards for rstd and backwards for y. The second time x comes from the cache as far as that
reaches, from memory otherwise: 4 to 6 bytes per element, where a norm and a cast by themselves move 8.

Legend: M = tokens, K = columns, W = K / 2 words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from benchmarks.producers.pieces import (
    Launch,
    Made,
    Room,
    count_in,
    in_words,
    publish,
    read_given,
    to_words,
    write,
)
from torch import Tensor

from narrowgauge.compute.kernels.both import Given
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, magnitude_bits, widen
from narrowgauge.compute.kernels.fused.tile import BF16, high, larger_halves, load, low
from narrowgauge.compute.recipes import Operand
from narrowgauge.errors import ShapeError

ROWS = Launch(32, 256, 8, 128)


@triton.jit
def _rms_norm(
    x_ptr, weight_ptr, scale_ptr, inv_scale_ptr, rstd_ptr, high_ptr, plain_ptr, turned_ptr, out_ptr, slot_ptr,
    scratch_ptr, M, W, stride_m, stride_weight, eps,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, CODES: tl.constexpr, HIGH: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, SLOT: tl.constexpr,
    INTERPRET: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, WORDS).to(tl.int64)
    squares = tl.zeros((ROWS, WORDS), tl.float32)
    first = tl.program_id(0).to(tl.int64) * 0
    x, _ = load(x_ptr, m, w, M, 2 * W, W, stride_m, 1, BF16)
    while first < W:
        coming, _ = load(x_ptr, m, first + WORDS + w, M, 2 * W, W, stride_m, 1, BF16)  # while this one is worked on
        even, odd = low(x, BF16), high(x, BF16)
        squares += even * even + odd * odd
        x = coming
        first += WORDS
    rstd = tl.where(m < M, tl.rsqrt(tl.sum(squares, 1) / (2 * W) + eps), 0.0)
    tl.store(rstd_ptr + m, rstd, mask=m < M)
    inv_scale, scale = read_given(scale_ptr, inv_scale_ptr, CODES)
    largest = tl.zeros((ROWS, WORDS), tl.int32)
    first -= WORDS
    x, _ = load(x_ptr, m, first + w, M, 2 * W, W, stride_m, 1, BF16)
    while first >= 0:
        k = first + w
        end = tl.where(first > 0, W, -WORDS)  # before the first tile there is nothing
        coming, _ = load(x_ptr, m, k - WORDS, M, 2 * W, end, stride_m, 1, BF16)
        at = weight_ptr + 2 * k * stride_weight
        weight_even = widen(tl.load(at, mask=k < W, other=0.0))[None, :]
        weight_odd = widen(tl.load(at + stride_weight, mask=k < W, other=0.0))[None, :]
        even, odd = low(x, BF16) * rstd[:, None] * weight_even, high(x, BF16) * rstd[:, None] * weight_odd
        y = to_words(even, odd, INTERPRET)
        seen = tl.where(k[None, :] < W, y, 0)  # outside, 0 times an infinite rstd
        if INTERPRET:
            found = tl.maximum(magnitude_bits(low(seen, BF16)), magnitude_bits(high(seen, BF16)))
            largest = tl.maximum(largest, found)
        else:
            largest = larger_halves(largest, seen & 0x7FFF7FFF)
        write(
            y, inv_scale, m, m, k, M, M, W, high_ptr, plain_ptr, turned_ptr,
            HIGH, PLAIN, TURNED, MANTISSA, MAX, INTERPRET,
        )  # fmt: skip
        x = coming
        first -= WORDS
    if INTERPRET:
        bits = tl.max(tl.max(largest, 1), 0)
    else:
        both = tl.reduce(tl.reduce(largest, 1, larger_halves), 0, larger_halves)
        bits = tl.maximum(magnitude_bits(low(both, BF16)), magnitude_bits(high(both, BF16)))
    publish(count_in(bits, scratch_ptr), scale, out_ptr, slot_ptr, scratch_ptr, CODES, SLOT)


def rms_norm_given(
    x_MK: Tensor, weight_K: Tensor, eps: float, rule: Operand, given: Given, *,
    plain: bool = True, turned: bool = True, high: bool = False, launch: Launch = ROWS,
) -> tuple[Made, Tensor]:  # fmt: skip
    """Codes of y = x rstd weight under a given scale and the amax of y, and rstd [M] float32, in one launch.

    Args:
        x_MK: bfloat16, K even.
        weight_K: any float dtype of 32 bits or fewer.
        eps: as of `torch.nn.RMSNorm`.
        rule: its format counts.
        given: scale, slot and scratch as for `tensorwise.cast_given`.
        plain, turned, high: whether to write codes [M, K], codes [K, M], and y itself.
        launch: how the work is cut; its columns are those of one round.
    """
    return _run(x_MK, weight_K, eps, rule, given, plain, turned, high, launch)


def rms_norm_amax(
    x_MK: Tensor, weight_K: Tensor, eps: float, *, launch: Launch = ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x rstd weight, [M, K] bfloat16, its amax [], and rstd [M]; arguments as for `rms_norm_given`."""
    made, rstd = _run(x_MK, weight_K, eps, None, None, False, False, True, launch)
    assert made.high is not None
    return made.high, made.amax, rstd


def _run(
    x_MK: Tensor, weight_K: Tensor, eps: float, rule: Operand | None, given: Given | None,
    plain: bool, turned: bool, high: bool, launch: Launch,
) -> tuple[Made, Tensor]:  # fmt: skip
    x = in_words(x_MK, "x")
    M, K = x.shape
    if weight_K.shape != (K,):
        raise ShapeError(f"weight is {list(weight_K.shape)} and x {list(x.shape)}; weight must be {[K]}.")
    room, rstd = Room(M, K, x, rule, given, plain, turned, high), torch.empty(M, device=x.device)
    _rms_norm[(max(1, triton.cdiv(M, launch.rows)),)](
        x, weight_K, room.scale, room.inv_scale, rstd, room.high, room.plain, room.turned, room.out, room.slot,
        room.scratch, M, K // 2, x.stride(0) // 2, weight_K.stride(0), eps,
        *room.facts, INTERPRETED, launch.rows, launch.columns // 2, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return room.made(), rstd
