"""`rows`, watched: the same codes and scales, and what the packed moments need, in the launch that casts.

    programs      the first few    a sample of rows: histograms, kurtosis
                  then             errors of a share of the rows
                  then             codes of everything, with amax, amin, sums and counts of everything

The amaxes are known from the launch before. A program that casts walks along its rows: what is to be known of a row's
scale is found once for all of its tiles, and a row's sums wait in its own unit until the end.

What is counted are plain codes under plain scales, even where only the turned ones are asked for.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Again, Launch
from narrowgauge.compute.kernels.fused.room import facts, half_step, matrix, room
from narrowgauge.compute.kernels.fused.rows import Amaxes
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, inv_scale_of, scale_of
from narrowgauge.compute.kernels.fused.tile import (
    copied,
    even,
    load,
    registers,
    store_plain,
    store_turned,
)
from narrowgauge.compute.kernels.fused.watched.errors import ERRORS, look_at_errors
from narrowgauge.compute.kernels.fused.watched.grains import (
    LINES,
    add_scales,
    close_grained,
    close_scales,
    common_inverse,
    no_scales,
    turned_scales,
)
from narrowgauge.compute.kernels.fused.watched.looks import Look
from narrowgauge.compute.kernels.fused.watched.moments import (
    FIELDS,
    close_own,
    flush_limit_of,
    recount,
)
from narrowgauge.compute.kernels.fused.watched.plan import LATE, RECOUNTED, RUN, SEGMENT, UNIT_ROWS, Plan
from narrowgauge.compute.kernels.fused.watched.sampling import COUNTS, GROUP, SAMPLE_ROWS, look_at_sample
from narrowgauge.compute.kernels.fused.watched.sums import add_own, nothing_yet, packed_limit
from narrowgauge.compute.kernels.fused.watched.whole_rows import WatchedWholeRows
from narrowgauge.compute.recipes import Operand
from narrowgauge.metrics.bins import RANGE_BLOCK

WORDS = SEGMENT // 2  # of a tile
WARPS, REGISTERS = 4, 96  # of a program, and of a thread where numbers have 16 bits


@triton.jit(do_not_specialize=LATE)
def _watched_rows(
    x_ptr, row_ptr, plain_ptr, plain_scale_ptr, turned_ptr, turned_scale_ptr,
    room_ptr, rows_ptr, columns_ptr, counts_ptr, M, K, W, stride_m, stride_w, x_stride_m, x_stride_k,
    samples, errors, lines, segments, first, stride, sampled, share, phase,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr,
    FLOOR: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, INTERPRET: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr, RUN: tl.constexpr, TAKE: tl.constexpr,
    C: tl.constexpr, FIELDS: tl.constexpr, ERRORS: tl.constexpr, GROUP: tl.constexpr, SAMPLE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COUNTS: tl.constexpr,
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
        band, segment = at // segments, at % segments
        inv_unit = common_inverse(
            row_ptr, x_ptr, M, K, W, stride_m, stride_w, LINES, UNIT_ROWS, WORDS, KIND, GOAL, POW2, FLOOR, INTERPRET
        )
        look_at_errors(
            room_ptr + FIELDS * P + at, errors, rows_ptr + segment * 2 * lines, columns_ptr + band * 2 * K, lines,
            x_ptr, M, K, W, stride_m, stride_w, band * TAKE, segment * WORDS, share, phase,
            inv_unit, 1.0 / inv_unit.to(tl.float64), row_ptr, 0, LINES, KIND, MANTISSA, MAX, GOAL, POW2, FLOOR,
            INTERPRET, TAKE, C, WORDS, RUN,
        )  # fmt: skip
    else:
        at = P - 1 - (pid - samples - errors)  # backwards: the cache may still hold the end
        strips = tl.cdiv(segments, STEPS)
        band, strip = at // strips, at % strips
        row0, col0 = band * ROWS, strip * STEPS * 2 * WORDS
        record = room_ptr + FIELDS * at
        rows, columns = tl.minimum(ROWS, M - row0), tl.minimum(STEPS * 2 * WORDS, K - col0)
        column_ptr = row_ptr + M
        m = (row0 + tl.arange(0, ROWS)).to(tl.int64)
        v = strip * STEPS * WORDS + tl.arange(0, WORDS)
        inside = m < M
        bits = tl.load(row_ptr + m, mask=inside, other=0)
        amax = bits.to(tl.float32, bitcast=True)
        inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
        scale, healthy = scale_of(amax, inv_scale, POW2), amax < float("inf")
        if PLAIN:
            tl.store(plain_scale_ptr + m, scale, mask=inside & (strip == 0))
        limit = flush_limit_of(scale, inv_scale, HALF, POW2)
        limit = packed_limit(tl.where(healthy, limit, 0), KIND, INTERPRET)[:, None]
        inv = inv_scale[:, None]
        s, q, least, flushed = nothing_yet(ROWS, WORDS, RUN, KIND, INTERPRET)
        steps = tl.cdiv(columns, 2 * WORDS)
        next_a, next_b = load(x_ptr, m, v.to(tl.int64), M, K, W, stride_m, stride_w, KIND)
        step = tl.zeros_like(steps)
        while step < steps:
            w = v.to(tl.int64)
            a, b = next_a, next_b  # the next tile is on its way while this one is worked on
            more = tl.where(step + 1 < steps, M, 0)
            next_a, next_b = load(x_ptr, m, w + WORDS, more, K, W, stride_m, stride_w, KIND)
            if PLAIN:
                store_plain(plain_ptr, a, b, inv, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
            s, q, least, flushed = add_own(s, q, least, flushed, a, b, limit, RUN, KIND, INTERPRET)
            if TURNED:
                evens = tl.load(column_ptr + 2 * v, mask=v < W, other=0)
                odds = tl.load(column_ptr + 2 * v + 1, mask=2 * v + 1 < K, other=0)
                inv_low, inv_high = turned_scales(turned_scale_ptr, evens, odds, v, K, W, band == 0, GOAL, POW2, FLOOR)
                inv_low, inv_high = inv_low[:, None], inv_high[:, None]
                store_turned(turned_ptr, a, b, inv_low, inv_high, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
            v += WORDS
            step += 1
        known = tl.max(bits, 0).to(tl.float32, bitcast=True)
        again = close_own(record, s, q, least, flushed, rows * columns, RUN, KIND, INTERPRET)
        healthy = healthy & inside
        count, total, squares, smallest, largest = no_scales(ROWS)
        count, total, squares, smallest, largest = add_scales(
            count, total, squares, smallest, largest, scale, healthy & (strip == 0)
        )
        close_scales(record, count, total, squares, smallest, largest)
        ratio_ptr = room_ptr + FIELDS * P + ERRORS * errors + GROUP * samples
        close_grained(record, known, tl.sum(healthy.to(tl.int32), 0), columns, at, ratio_ptr)
        if again | ((known < float("inf")) == 0):
            recount(
                record, x_ptr, M, K, x_stride_m, x_stride_k, row0, ROWS, col0,
                1.0, float("inf"), C, 2 * WORDS, 2 * RUN, STEPS,
            )  # fmt: skip


def watched_rows(x_MK: Tensor, rule: Operand, plan: Plan, plain: bool, turned: bool) -> WatchedRows | WatchedWholeRows:
    """`cast_rows` of all matrices that lie in memory as `x_MK` does, for looks of one plan."""
    return (
        WatchedWholeRows(x_MK, rule, plan, plain) if plan.walk.whole else WatchedRows(x_MK, rule, plan, plain, turned)
    )


class WatchedRows:
    """`watched_rows` where turned codes are asked for, or rows are too long to be held."""

    def __init__(self, x_MK: Tensor, rule: Operand, plan: Plan, plain: bool, turned: bool) -> None:
        M, K = x_MK.shape
        x, W, stride_m, stride_w, kind = even(x_MK)
        self._fmt, self._plain, self._turned, self._copies = rule.fmt, plain, turned, x is not x_MK
        self._amaxes = Amaxes(x, True, turned)
        numbers = *facts(rule.fmt, rule.scaling, rule.margin), half_step(rule.fmt)
        constants = (
            kind, *numbers, plain, turned, INTERPRETED, plan.walk.rows, WORDS, plan.steps, RUN, plan.error_lines,
            RECOUNTED, FIELDS, ERRORS, GROUP, SAMPLE_ROWS, RANGE_BLOCK, COUNTS,
        )  # fmt: skip
        self._launch = Launch(
            _watched_rows, plan.samples + plan.errors + plan.programs, (M, K, W, stride_m, stride_w, *x.stride()),
            constants, num_warps=WARPS, maxnreg=registers(kind, REGISTERS),
        )  # fmt: skip

    def __call__(self, x_MK: Tensor, look: Look) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """As `rows.cast_rows`, filling `look`."""
        M, K = x_MK.shape
        codes_MK, codes_KM = room(x_MK, self._fmt, self._plain, self._turned)
        scale_M = matrix(M, 1, x_MK) if self._plain else None
        scale_K = matrix(K, 1, x_MK) if self._turned else None
        x = copied(x_MK) if self._copies else x_MK
        tensors = (x, self._amaxes(x), codes_MK, scale_M, codes_KM, scale_K, *look.pointers)
        self._launch(tensors, look.numbers)
        return codes_MK, scale_M, codes_KM, scale_K

    def again(self, x_MK: Tensor, look: Look) -> Again | None:
        """None: the amaxes of such rows go where there is room for them at the time."""
        return None


def cast_rows(
    x_MK: Tensor, rule: Operand, *, look: Look, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As `rows.cast_rows`, filling `look`."""
    return watched_rows(x_MK, rule, look.plan, plain, turned)(x_MK, look)
