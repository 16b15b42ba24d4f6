"""Errors of a tensor with a scale per square, from a share of its rows, when all of its scales are known.

A program that looks at errors takes a few of every 64 rows; while scales are still being found, it would have to read
all of them to know its squares'. So this is a launch of its own, which reads that share only.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import launch
from narrowgauge.compute.kernels.fused.rules import INTERPRETED
from narrowgauge.compute.kernels.fused.tile import registers, words
from narrowgauge.compute.kernels.fused.watched.grains import SQUARES
from narrowgauge.compute.kernels.fused.watched.looks import Look
from narrowgauge.compute.kernels.fused.watched.moments import FIELDS
from narrowgauge.compute.kernels.fused.watched.plan import EVERY, LATE, RECOUNTED, REGISTERS, SEGMENT
from narrowgauge.compute.kernels.fused.watched.sampling import look_at_errors, scales_at
from narrowgauge.formats import Format


@triton.jit(do_not_specialize=["programs", *LATE])
def _watched_square_errors(
    x_ptr, scale_ptr, room_ptr, rows_ptr, columns_ptr, M, K, stride_m, stride_w, programs,
    samples, errors, lines, segments, first, stride, sampled, group, phase,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, INTERPRET: tl.constexpr, WORDS: tl.constexpr,
    TAKE: tl.constexpr, C: tl.constexpr, EVERY: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    band, segment = at // segments, at % segments
    inv_unit = scales_at(scale_ptr, True)[1]
    look_at_errors(
        room_ptr + FIELDS * programs + at, errors, rows_ptr + segment * 2 * lines, columns_ptr + band * 2 * K, lines,
        x_ptr, M, K, stride_m, stride_w, band * TAKE, segment * WORDS, group, phase, inv_unit,
        1.0 / inv_unit.to(tl.float64), scale_ptr + segment, segments, SQUARES, KIND, MANTISSA, MAX, 0.0, False, 0.0,
        INTERPRET, EVERY, TAKE, C, WORDS,
    )  # fmt: skip


def square_errors(x: Tensor, fmt: Format, look: Look, scale: Tensor) -> None:
    """Fill what a look holds of errors.

    Args:
        x: [M, K], what was quantized.
        fmt: the codes' format.
        look: opened for it.
        scale: [ceil(M / 128), ceil(K / 128)], contiguous.
    """
    _, stride_m, stride_w, kind = words(x)
    plan = look.plan
    constants = (
        kind, fmt.mantissa_bits, fmt.max, INTERPRETED, SEGMENT // 2, plan.error_lines, RECOUNTED, EVERY, FIELDS
    )  # fmt: skip
    launch(
        _watched_square_errors, plan.errors, (x, scale, *look.pointers[:3]), (*x.shape, stride_m, stride_w), constants,
        (plan.programs, *look.numbers), num_warps=4, maxnreg=registers(kind, REGISTERS),
    )  # fmt: skip
