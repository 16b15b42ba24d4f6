"""Errors from a share of a tensor's rows, in a launch of their own, when all of its scales are known.

A program that looks at errors takes one of every 31 rows. While scales are still being found it would have to read
more than those: all rows of a square, or all of a row whose other columns are other programs'. So squares, and rows
that are found and cast in one read, leave their amaxes behind, and this launch reads that share only.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Launch
from narrowgauge.compute.kernels.fused.room import facts
from narrowgauge.compute.kernels.fused.rules import INTERPRETED
from narrowgauge.compute.kernels.fused.tile import registers, words
from narrowgauge.compute.kernels.fused.watched.grains import LINES, SQUARES, common_inverse, scales_of
from narrowgauge.compute.kernels.fused.watched.looks import Look
from narrowgauge.compute.kernels.fused.watched.moments import FIELDS
from narrowgauge.compute.kernels.fused.watched.plan import EVERY, LATE, RECOUNTED, REGISTERS, SEGMENT, Plan
from narrowgauge.compute.kernels.fused.watched.sampling import look_at_errors
from narrowgauge.compute.recipes import Operand


@triton.jit(do_not_specialize=["programs", *LATE])
def _watched_errors(
    x_ptr, bits_ptr, room_ptr, rows_ptr, columns_ptr, M, K, W, stride_m, stride_w, programs,
    samples, errors, lines, segments, first, stride, sampled, group, phase,
    GRAIN: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr,
    POW2: tl.constexpr, FLOOR: tl.constexpr, INTERPRET: tl.constexpr, WORDS: tl.constexpr, TAKE: tl.constexpr,
    C: tl.constexpr, EVERY: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    band, segment = at // segments, at % segments
    if GRAIN == SQUARES:
        inv_unit = scales_of(tl.load(bits_ptr), GOAL, POW2, FLOOR)[1]
        grain_ptr, grain_stride = bits_ptr + segment, segments
    else:
        inv_unit = common_inverse(
            bits_ptr, x_ptr, M, K, W, stride_m, stride_w, LINES, 1024, WORDS, KIND, GOAL, POW2, FLOOR, INTERPRET
        )
        grain_ptr, grain_stride = bits_ptr, 0
    look_at_errors(
        room_ptr + FIELDS * programs + at, errors, rows_ptr + segment * 2 * lines, columns_ptr + band * 2 * K, lines,
        x_ptr, M, K, stride_m, stride_w, band * TAKE, segment * WORDS, group, phase, inv_unit,
        1.0 / inv_unit.to(tl.float64), grain_ptr, grain_stride, GRAIN, KIND, MANTISSA, MAX, GOAL, POW2, FLOOR,
        INTERPRET, EVERY, TAKE, C, WORDS,
    )  # fmt: skip


class LaterErrors:
    """What looks of one plan hold of errors, for all matrices that lie in memory as `x_MK` does.

    Args:
        grain: SQUARES or LINES.
        x_MK: what is quantized, as words.
        rule: by which it is.
        plan: of the looks.
    """

    def __init__(self, grain: int, x_MK: Tensor, rule: Operand, plan: Plan) -> None:
        W, stride_m, stride_w, kind = words(x_MK)
        constants = (
            grain, kind, *facts(rule.fmt, rule.scaling, rule.margin), INTERPRETED, SEGMENT // 2, plan.error_lines,
            RECOUNTED, EVERY, FIELDS,
        )  # fmt: skip
        self._launch = Launch(
            _watched_errors, plan.errors, (*x_MK.shape, W, stride_m, stride_w), constants, num_warps=4,
            maxnreg=registers(kind, REGISTERS),
        )  # fmt: skip

    def __call__(self, x_MK: Tensor, bits: Tensor, look: Look) -> None:
        """Fill `look`. `bits`: of the amaxes of squares [ceil(M / 128), ceil(K / 128)], contiguous, or of rows [M]."""
        self._launch((x_MK, bits, *look.pointers[:3]), (look.plan.programs, *look.numbers))
