"""Errors of squares from a share of a tensor's rows, in a launch of their own, when all scales are known.

A program that looks at errors takes few rows. While scales are still being found it would have to read all rows of
their squares; so squares leave their amaxes behind, and this launch reads the share only.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Again, Launch
from narrowgauge.compute.kernels.fused.room import facts
from narrowgauge.compute.kernels.fused.rules import INTERPRETED
from narrowgauge.compute.kernels.fused.tile import SIDE, registers, words
from narrowgauge.compute.kernels.fused.watched.errors import look_at_errors
from narrowgauge.compute.kernels.fused.watched.grains import LINES, SQUARES, common_inverse
from narrowgauge.compute.kernels.fused.watched.looks import Look
from narrowgauge.compute.kernels.fused.watched.moments import FIELDS
from narrowgauge.compute.kernels.fused.watched.plan import LATE, RECOUNTED, REGISTERS, RUN, SEGMENT, UNIT_ROWS, Plan
from narrowgauge.compute.recipes import Operand


@triton.jit(do_not_specialize=["programs", *LATE])
def _watched_errors(
    x_ptr, bits_ptr, room_ptr, rows_ptr, columns_ptr, M, K, W, stride_m, stride_w, programs,
    samples, errors, lines, segments, first, stride, sampled, share, phase,
    GRAIN: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr,
    POW2: tl.constexpr, FLOOR: tl.constexpr, INTERPRET: tl.constexpr, WORDS: tl.constexpr, TAKE: tl.constexpr,
    C: tl.constexpr, RUN: tl.constexpr, SIDE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    band, segment = at // segments, at % segments
    squares = tl.cdiv(M, SIDE) * segments
    inv_unit = common_inverse(
        bits_ptr, x_ptr, squares, K, W, stride_m, stride_w, LINES, UNIT_ROWS, WORDS, KIND, GOAL, POW2, FLOOR, INTERPRET
    )
    look_at_errors(
        room_ptr + FIELDS * programs + at, errors, rows_ptr + segment * 2 * lines, columns_ptr + band * 2 * K, lines,
        x_ptr, M, K, W, stride_m, stride_w, band * TAKE, segment * WORDS, share, phase, inv_unit,
        1.0 / inv_unit.to(tl.float64), bits_ptr + segment, segments, GRAIN, KIND, MANTISSA, MAX, GOAL, POW2, FLOOR,
        INTERPRET, TAKE, C, WORDS, RUN,
    )  # fmt: skip


class SquareErrors:
    """What looks of one plan hold of errors, for all matrices that lie in memory as `x_MK` does.

    Args:
        x_MK: what is quantized, as words.
        rule: by which it is.
        plan: of the looks.
    """

    def __init__(self, x_MK: Tensor, rule: Operand, plan: Plan) -> None:
        W, stride_m, stride_w, kind = words(x_MK)
        constants = (
            SQUARES.value, kind, *facts(rule.fmt, rule.scaling, rule.margin), INTERPRETED, SEGMENT // 2,
            plan.error_lines, RECOUNTED, RUN, SIDE, FIELDS,
        )  # fmt: skip
        self._launch = Launch(
            _watched_errors, plan.errors, (*x_MK.shape, W, stride_m, stride_w), constants, num_warps=4,
            maxnreg=registers(kind, REGISTERS),
        )  # fmt: skip

    def __call__(self, x_MK: Tensor, bits: Tensor, look: Look) -> None:
        """Fill `look`. `bits`: of the squares' amaxes [ceil(M / 128), ceil(K / 128)], contiguous."""
        self._launch((x_MK, bits, *look.pointers[:3]), (look.plan.programs, *look.numbers))

    def again(self, x_MK: Tensor, bits: Tensor, look: Look) -> Again | None:
        """The same for what lies as x_MK does."""
        launched = self._launch.again((x_MK, bits, *look.pointers[:3]))
        return None if launched is None else launched.told(look.plan.programs)
