"""`rows` without turned codes, watched, where a program holds whole rows: scales, codes and sums from one read.

    programs      the first few    a sample of rows: histograms, kurtosis
                  then             errors of a share of the rows, whole ones as well, for each brings its own scale
                  then             codes of everything, with amax, amin, sums and counts of everything

Legend: M = rows, K = columns, W = K / 2 words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Again, Launch
from narrowgauge.compute.kernels.fused.room import facts, half_step, matrix, room
from narrowgauge.compute.kernels.fused.rows import whole
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, inv_scale_of, scale_of
from narrowgauge.compute.kernels.fused.tile import BF16, copied, even, load, registers, row_amaxes, store_plain
from narrowgauge.compute.kernels.fused.watched.errors import ERRORS, look_at_errors
from narrowgauge.compute.kernels.fused.watched.grains import (
    HELD,
    TILES,
    add_scales,
    close_grained,
    close_lines,
    common_inverse,
    no_scales,
)
from narrowgauge.compute.kernels.fused.watched.looks import Look
from narrowgauge.compute.kernels.fused.watched.moments import (
    FIELDS,
    flush_limit_of,
    recount,
)
from narrowgauge.compute.kernels.fused.watched.plan import (
    HOLD,
    LATE,
    LONG,
    RECOUNTED,
    REGISTERS,
    RUN,
    SEGMENT,
    UNIT_WORDS,
    Plan,
)
from narrowgauge.compute.kernels.fused.watched.sampling import COUNTS, GROUP, SAMPLE_ROWS, look_at_sample
from narrowgauge.compute.kernels.fused.watched.sums import add_own, nothing_yet, packed_limit
from narrowgauge.compute.recipes import Operand
from narrowgauge.metrics.bins import RANGE_BLOCK


@triton.jit(do_not_specialize=LATE)
def _watched_whole_rows(
    x_ptr, plain_ptr, scale_ptr, room_ptr, rows_ptr, columns_ptr, counts_ptr, M, K, W, stride_m, stride_w, x_stride_m,
    x_stride_k, samples, errors, lines, segments, first, stride, sampled, share, phase,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr,
    FLOOR: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr, INTERPRET: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, STEPS: tl.constexpr, RUN: tl.constexpr, TAKE: tl.constexpr, C: tl.constexpr,
    SPANS: tl.constexpr, T: tl.constexpr, FIELDS: tl.constexpr, ERRORS: tl.constexpr, GROUP: tl.constexpr,
    SAMPLE_ROWS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    P = tl.num_programs(0) - samples - errors
    if pid < samples:
        look_at_sample(
            room_ptr + FIELDS * P + ERRORS * errors, counts_ptr, samples, x_ptr, M, K, x_stride_m, x_stride_k,
            first, stride, sampled, tl.cdiv(K, BLOCK), SAMPLE_ROWS, BLOCK, COUNTS,
        )  # fmt: skip
    elif pid < samples + errors:
        at = pid - samples
        band, part = at // segments, at % segments
        inv_unit = common_inverse(
            None, x_ptr, M, K, W, stride_m, stride_w, TILES, 16, UNIT_WORDS if WORDS > UNIT_WORDS else WORDS, KIND,
            GOAL, POW2, FLOOR, INTERPRET,
        )  # fmt: skip
        look_at_errors(
            room_ptr + FIELDS * P + at, errors, rows_ptr + part * 2 * lines, columns_ptr + band * 2 * K, lines, x_ptr,
            M, K, W, stride_m, stride_w, band * TAKE, part * (WORDS // PARTS), share, phase, inv_unit,
            1.0 / inv_unit.to(tl.float64), None, 0, HELD, KIND, MANTISSA, MAX, GOAL, POW2, FLOOR, INTERPRET, TAKE,
            ROWS, WORDS // PARTS, RUN, WORDS,
        )  # fmt: skip
    else:
        at = P - 1 - (pid - samples - errors)  # backwards: the cache may still hold the end
        row0 = at * STEPS * ROWS
        record = room_ptr + FIELDS * at
        rows = tl.minimum(STEPS * ROWS, M - row0)
        w = tl.arange(0, WORDS).to(tl.int64)
        s, q, least, flushed = nothing_yet(ROWS, WORDS, RUN, KIND, INTERPRET)
        top = tl.zeros((ROWS,), tl.int32)
        count, total, squares, smallest, largest = no_scales(ROWS)
        i = row0 + tl.arange(0, ROWS)
        if AHEAD:
            next_a, next_b = load(x_ptr, i.to(tl.int64), w, M, K, W, stride_m, stride_w, KIND)
        step = tl.zeros_like(rows)
        while step < tl.cdiv(rows, ROWS):
            m, inside = i.to(tl.int64), i < M
            if AHEAD:
                a, b = next_a, next_b  # the next rows are on their way while these are worked on
                more = tl.minimum(row0 + STEPS * ROWS, M)
                next_a, next_b = load(x_ptr, m + ROWS, w, more, K, W, stride_m, stride_w, KIND)
            else:
                a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
            bits = row_amaxes(a, b, KIND, INTERPRET)
            amax = bits.to(tl.float32, bitcast=True)
            inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
            scale, healthy = scale_of(amax, inv_scale, POW2), amax < float("inf")
            inv = inv_scale[:, None]
            if PLAIN:
                tl.store(scale_ptr + i, scale, mask=inside)
                store_plain(plain_ptr, a, b, inv, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
            top = tl.maximum(top, bits)
            count, total, squares, smallest, largest = add_scales(
                count, total, squares, smallest, largest, scale, healthy & inside
            )
            limit = flush_limit_of(scale, inv_scale, HALF, POW2)
            limit = packed_limit(tl.where(healthy, limit, 0), KIND, INTERPRET)[:, None]
            s, q, least, flushed = add_own(s, q, least, flushed, a, b, limit, RUN, KIND, INTERPRET)
            i += ROWS
            step += 1
        again, healthy_rows, top = close_lines(
            record, s, q, least, flushed, rows * K, count, total, squares, smallest, largest, top,
            RUN, KIND, INTERPRET,
        )  # fmt: skip
        known = top.to(tl.float32, bitcast=True)
        ratio_ptr = room_ptr + FIELDS * P + ERRORS * errors + GROUP * samples
        close_grained(record, known, healthy_rows, K, at, ratio_ptr)
        if again | ((known < float("inf")) == 0):
            recount(
                record, x_ptr, M, K, x_stride_m, x_stride_k, row0, STEPS * ROWS, 0,
                1.0, float("inf"), C, T, 2 * RUN, SPANS,
            )  # fmt: skip


class WatchedWholeRows:
    """`cast_rows`, without turned codes, of all matrices that lie in memory as `x_MK` does, for looks of one plan."""

    def __init__(self, x_MK: Tensor, rule: Operand, plan: Plan, plain: bool) -> None:
        M, K = x_MK.shape
        x, W, stride_m, stride_w, kind = even(x_MK)
        self._fmt, self._plain, self._copies = rule.fmt, plain, x is not x_MK
        # Two programs at once, one of which works while the other waits for its rows, or else rows loaded ahead.
        long = W > LONG and kind >= BF16
        words, rows, warps = whole(W, HOLD, 2048 if long else 512)
        numbers = *facts(rule.fmt, rule.scaling, rule.margin), half_step(rule.fmt)
        constants = (
            kind, *numbers, plain, INTERPRETED, rows, words, plan.steps, RUN, plan.error_lines,
            min(RECOUNTED, rows * plan.steps), triton.cdiv(K, SEGMENT), SEGMENT, FIELDS, ERRORS, GROUP, SAMPLE_ROWS,
            RANGE_BLOCK, COUNTS, plan.segments, not long,
        )  # fmt: skip
        self._launch = Launch(
            _watched_whole_rows, plan.samples + plan.errors + plan.programs,
            (M, K, W, stride_m, stride_w, *x.stride()), constants, num_warps=warps,
            maxnreg=None if long else registers(kind, REGISTERS),
        )  # fmt: skip

    def __call__(self, x_MK: Tensor, look: Look) -> tuple[Tensor | None, Tensor | None, None, None]:
        """As `rows.cast_rows`, filling `look`."""
        M = x_MK.shape[0]
        codes_MK, _ = room(x_MK, self._fmt, self._plain, False)
        scale_M = matrix(M, 1, x_MK) if self._plain else None
        x = copied(x_MK) if self._copies else x_MK
        self._launch((x, codes_MK, scale_M, *look.pointers), look.numbers)
        return codes_MK, scale_M, None, None

    def again(self, x_MK: Tensor, look: Look) -> Again | None:
        """The same where no codes are made, for what lies as x_MK does; None where that has to be copied first."""
        return None if self._copies else self._launch.again((x_MK, None, None, *look.pointers))
