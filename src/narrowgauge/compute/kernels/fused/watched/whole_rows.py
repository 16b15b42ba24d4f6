"""`rows` without turned codes, watched, where a program holds whole rows: scales, codes and sums from one read.

    programs      the first few    a sample of rows: histograms, kurtosis
                  then             codes of everything, with amax, amin, sums and counts of everything

Errors are a launch behind this one: their programs take columns of many rows, whose scales are known only then.

Legend: M = rows, K = columns, W = K / 2 words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Launch
from narrowgauge.compute.kernels.fused.room import facts, half_step, matrix, room
from narrowgauge.compute.kernels.fused.rows import whole
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, inv_scale_of, scale_of
from narrowgauge.compute.kernels.fused.tile import copied, even, high, load, low, registers, row_amaxes, store_plain
from narrowgauge.compute.kernels.fused.watched.grains import LINES, add_scales, close_grained, close_lines, no_scales
from narrowgauge.compute.kernels.fused.watched.later_errors import LaterErrors
from narrowgauge.compute.kernels.fused.watched.looks import Look
from narrowgauge.compute.kernels.fused.watched.moments import (
    FIELDS,
    add_own,
    flush_limit_of,
    nothing_yet,
    packed_limit,
    recount,
)
from narrowgauge.compute.kernels.fused.watched.plan import HELD, LATE, RECOUNTED, REGISTERS, RUN, SEGMENT, Plan
from narrowgauge.compute.kernels.fused.watched.sampling import COUNTS, ERRORS, GROUP, SAMPLE_ROWS, look_at_sample
from narrowgauge.compute.recipes import Operand
from narrowgauge.metrics.bins import RANGE_BLOCK


@triton.jit(do_not_specialize=LATE)
def _watched_whole_rows(
    x_ptr, bits_ptr, plain_ptr, scale_ptr, room_ptr, counts_ptr, M, K, W, stride_m, stride_w, x_stride_m, x_stride_k,
    samples, errors, lines, segments, first, stride, sampled, group, phase,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr,
    FLOOR: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr, INTERPRET: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, STEPS: tl.constexpr, RUN: tl.constexpr, C: tl.constexpr, SPANS: tl.constexpr,
    T: tl.constexpr, FIELDS: tl.constexpr, ERRORS: tl.constexpr, GROUP: tl.constexpr, SAMPLE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    P = tl.num_programs(0) - samples
    if pid < samples:
        look_at_sample(
            room_ptr + FIELDS * P + ERRORS * errors, counts_ptr, samples, x_ptr, M, K, x_stride_m, x_stride_k,
            first, stride, sampled, tl.cdiv(K, BLOCK), SAMPLE_ROWS, BLOCK, COUNTS,
        )  # fmt: skip
    else:
        at = P - 1 - (pid - samples)  # backwards: the cache may still hold the end
        row0 = at * STEPS * ROWS
        record = room_ptr + at
        rows = tl.minimum(STEPS * ROWS, M - row0)
        w = tl.arange(0, WORDS).to(tl.int64)
        s, q, least, flushed = nothing_yet(ROWS, WORDS // RUN, KIND, INTERPRET)
        top = tl.zeros((ROWS,), tl.int32)
        count, total, squares, smallest, largest = no_scales(ROWS)
        inv_unit = tl.full((), 1.0, tl.float32)
        i = row0 + tl.arange(0, ROWS)
        next_a, next_b = load(x_ptr, i.to(tl.int64), w, M, K, W, stride_m, stride_w, KIND)
        step = tl.zeros_like(rows)
        while step < tl.cdiv(rows, ROWS):
            m, inside = i.to(tl.int64), i < M
            a, b = next_a, next_b  # the next rows are on their way while these are worked on
            more = tl.minimum(row0 + STEPS * ROWS, M)
            next_a, next_b = load(x_ptr, m + ROWS, w, more, K, W, stride_m, stride_w, KIND)
            bits = row_amaxes(a, b, KIND, INTERPRET)
            amax = bits.to(tl.float32, bitcast=True)
            inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
            scale, healthy = scale_of(amax, inv_scale, POW2), amax < float("inf")
            tl.store(bits_ptr + i, bits, mask=inside)
            inv = inv_scale[:, None]
            if PLAIN:
                tl.store(scale_ptr + i, scale, mask=inside)
                store_plain(plain_ptr, a, b, inv, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
            if step == 0:
                inv_unit = inv_scale_of(tl.max(bits, 0).to(tl.float32, bitcast=True), GOAL, POW2, FLOOR)
            top = tl.maximum(top, bits)
            count, total, squares, smallest, largest = add_scales(
                count, total, squares, smallest, largest, scale, healthy & inside
            )
            limit = flush_limit_of(scale, inv_scale, HALF, POW2)
            limit = packed_limit(tl.where(healthy, limit, 0), KIND, INTERPRET)[:, None, None]
            factor = (tl.where(healthy, scale, 0.0) * inv_unit)[:, None]
            va, vb = low(a, KIND) * inv, high(b, KIND) * inv
            s, q, least, flushed = add_own(
                s, q, least, flushed, a, b, va, vb, limit, RUN, KIND, INTERPRET, True, factor
            )
            i += ROWS
            step += 1
        again, healthy_rows, top = close_lines(
            record, P, s, q, least, flushed, rows * K, 1.0 / inv_unit.to(tl.float64), count, total, squares,
            smallest, largest, top, KIND, INTERPRET,
        )  # fmt: skip
        known = top.to(tl.float32, bitcast=True)
        ratio_ptr = room_ptr + FIELDS * P + ERRORS * errors + GROUP * samples
        close_grained(record, P, known, healthy_rows, K, at, ratio_ptr)
        if again | ((known < float("inf")) == 0):
            recount(
                record, P, x_ptr, M, K, x_stride_m, x_stride_k, row0, STEPS * ROWS, 0,
                1.0, float("inf"), C, T, 2 * RUN, SPANS,
            )  # fmt: skip


class WatchedWholeRows:
    """`cast_rows`, without turned codes, of all matrices that lie in memory as `x_MK` does, for looks of one plan."""

    def __init__(self, x_MK: Tensor, rule: Operand, plan: Plan, plain: bool) -> None:
        M, K = x_MK.shape
        x, W, stride_m, stride_w, kind = even(x_MK)
        self._fmt, self._plain, self._copies = rule.fmt, plain, x is not x_MK
        words, rows, warps = whole(W, HELD, 512)
        numbers = *facts(rule.fmt, rule.scaling, rule.margin), half_step(rule.fmt)
        constants = (
            kind, *numbers, plain, INTERPRETED, rows, words, plan.steps, RUN, min(RECOUNTED, rows * plan.steps),
            triton.cdiv(K, SEGMENT), SEGMENT, FIELDS, ERRORS, GROUP, SAMPLE_ROWS, RANGE_BLOCK, COUNTS,
        )  # fmt: skip
        self._launch = Launch(
            _watched_whole_rows, plan.samples + plan.programs, (M, K, W, stride_m, stride_w, *x.stride()), constants,
            num_warps=warps, maxnreg=registers(kind, REGISTERS),
        )  # fmt: skip
        self._errors = LaterErrors(LINES.value, x, rule, plan)

    def __call__(self, x_MK: Tensor, look: Look) -> tuple[Tensor | None, Tensor | None, None, None]:
        """As `rows.cast_rows`, filling `look`."""
        M = x_MK.shape[0]
        codes_MK, _ = room(x_MK, self._fmt, self._plain, False)
        scale_M = matrix(M, 1, x_MK) if self._plain else None
        x, bits = copied(x_MK) if self._copies else x_MK, matrix(M, 1, x_MK).view(torch.int32)
        self._launch((x, bits, codes_MK, scale_M, look.room, look.counts), look.numbers)
        self._errors(x, bits, look)
        return codes_MK, scale_M, None, None
