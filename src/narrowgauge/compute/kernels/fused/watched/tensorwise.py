"""`tensorwise`, watched: the same codes and scales, and what the packed moments need, in the same launch.

    programs      the first few    a sample of rows: histograms, kurtosis
                  then             errors of a share of the rows
                  then             codes of everything, with amax, amin, sums and counts of everything

A program that casts walks down a band of rows, so that what it gathers is reduced once for many tiles.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Again, Launch
from narrowgauge.compute.kernels.fused.room import facts, half_step, number, room
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, inv_scale_of, scale_of
from narrowgauge.compute.kernels.fused.tensorwise import ROWS_OF_A_TABLE
from narrowgauge.compute.kernels.fused.tile import load, registers, store_plain, store_turned, words
from narrowgauge.compute.kernels.fused.watched.errors import ERRORS, look_at_errors
from narrowgauge.compute.kernels.fused.watched.grains import WHOLE
from narrowgauge.compute.kernels.fused.watched.looks import Look
from narrowgauge.compute.kernels.fused.watched.moments import (
    AMAX,
    FIELDS,
    INFS,
    LARGEST,
    MARGIN,
    NANS,
    SATURATED,
    SCALE_MAX,
    SCALE_MIN,
    SCALE_N,
    SCALE_SQUARES,
    SCALE_SUM,
    close_own,
    flush_limit,
    recount,
)
from narrowgauge.compute.kernels.fused.watched.plan import LATE, RECOUNTED, REGISTERS, RUN, SEGMENT, Plan
from narrowgauge.compute.kernels.fused.watched.sampling import COUNTS, GROUP, SAMPLE_ROWS, look_at_sample
from narrowgauge.compute.kernels.fused.watched.sums import add_amax, add_own, close_amax, nothing_yet, packed_limit
from narrowgauge.compute.recipes import Operand
from narrowgauge.metrics.bins import RANGE_BLOCK

WORDS = SEGMENT // 2  # of a tile
WARPS = 4  # of a program


@triton.jit(do_not_specialize=LATE, do_not_specialize_on_alignment=ROWS_OF_A_TABLE)
def _watched(
    x_ptr, amax_ptr, given_ptr, inv_scale_ptr, plain_ptr, turned_ptr, scale_ptr, slot_ptr, scratch_ptr,
    room_ptr, rows_ptr, columns_ptr, counts_ptr, M, K, W, stride_m, stride_w, x_stride_m, x_stride_k,
    samples, errors, lines, segments, first, stride, sampled, share, phase,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr, POW2: tl.constexpr,
    FLOOR: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, GIVEN: tl.constexpr,
    SLOT: tl.constexpr, INTERPRET: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
    RUN: tl.constexpr, LINES: tl.constexpr, C: tl.constexpr, FIELDS: tl.constexpr, ERRORS: tl.constexpr,
    GROUP: tl.constexpr, SAMPLE_ROWS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    P = tl.num_programs(0) - samples - errors
    if SLOT:
        slot_ptr = slot_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if GIVEN:
        wanted = tl.load(inv_scale_ptr)
        if given_ptr is None:
            given = tl.math.div_rn(1.0, wanted)
        else:
            given = tl.load(given_ptr)
        usable = (given > 0) & (given < float("inf"))
        inv_scale = tl.where(usable, wanted, 1.0)
        scale = tl.where(usable, given, float("nan"))
    else:
        known = tl.load(amax_ptr + tl.arange(0, 1))
        inv = inv_scale_of(known, GOAL, POW2, FLOOR)
        if pid == 0:
            tl.store(scale_ptr + tl.arange(0, 1), scale_of(known, inv, POW2))
        known = tl.max(known, 0)
        inv_scale, scale = tl.max(inv, 0), tl.sum(scale_of(known, inv, POW2), 0)
    unit = 1.0 / inv_scale.to(tl.float64)
    if pid < samples:
        look_at_sample(
            room_ptr + FIELDS * P + ERRORS * errors, counts_ptr, samples, x_ptr, M, K, x_stride_m, x_stride_k,
            first, stride, sampled, tl.cdiv(K, BLOCK), SAMPLE_ROWS, BLOCK, COUNTS,
        )  # fmt: skip
    elif pid < samples + errors:
        at = pid - samples
        band, segment = at // segments, at % segments
        look_at_errors(
            room_ptr + FIELDS * P + at, errors, rows_ptr + segment * 2 * lines, columns_ptr + band * 2 * K, lines,
            x_ptr, M, K, W, stride_m, stride_w, band * LINES, segment * WORDS, share, phase, inv_scale, unit,
            scale_ptr, 0, WHOLE, KIND, MANTISSA, MAX, GOAL, POW2, FLOOR, INTERPRET, LINES, C, WORDS, RUN,
        )  # fmt: skip
    else:
        at = P - 1 - (pid - samples - errors)  # backwards: the cache may still hold the end
        band, segment = at // segments, at % segments
        row0 = band * STEPS * ROWS
        record = room_ptr + FIELDS * at
        w = (segment * WORDS + tl.arange(0, WORDS)).to(tl.int64)
        limit = packed_limit(flush_limit(inv_scale, HALF), KIND, INTERPRET)
        s, q, least, flushed = nothing_yet(ROWS, WORDS, RUN, KIND, INTERPRET)
        top = tl.zeros((ROWS, WORDS // RUN), tl.int32)
        rows = tl.minimum(STEPS * ROWS, M - row0)
        m = (row0 + tl.arange(0, ROWS)).to(tl.int64)
        next_a, next_b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
        for _ in range(STEPS):
            a, b = next_a, next_b  # the next tile is on its way while this one is worked on
            next_a, next_b = load(x_ptr, m + ROWS, w, row0 + rows, K, W, stride_m, stride_w, KIND)
            if PLAIN:
                store_plain(plain_ptr, a, b, inv_scale, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
            if TURNED:
                store_turned(turned_ptr, a, b, inv_scale, inv_scale, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
            s, q, least, flushed = add_own(s, q, least, flushed, a, b, limit, RUN, KIND, INTERPRET)
            if GIVEN:
                top = add_amax(top, a, b, RUN, KIND, INTERPRET)
            m += ROWS
        n = rows * tl.minimum(2 * WORDS, K - segment * 2 * WORDS)
        again = close_own(record, s, q, least, flushed, n, RUN, KIND, INTERPRET)
        # As the oracle has it: the inverse of the stored scale.
        inverse = tl.minimum(tl.math.div_rn(1.0, scale), LARGEST)
        if GIVEN:
            largest = close_amax(top, KIND, INTERPRET)
            known = largest.to(tl.float32, bitcast=True)
            again = again | (known * inverse > MAX * MARGIN)
        again = again | ((known < float("inf")) == 0)
        tl.store(record + AMAX, known.to(tl.float64))
        tl.store(record + SATURATED, 0.0)
        tl.store(record + NANS, 0.0)
        tl.store(record + INFS, 0.0)
        if at == 0:
            if GIVEN == 0:
                tl.store(room_ptr + FIELDS * P + ERRORS * errors + GROUP * samples, -float("inf"))  # no ratio
            healthy = (scale < float("inf")).to(tl.float64)
            wide = tl.where(healthy > 0, scale, 0.0).to(tl.float64)
            tl.store(record + SCALE_N, healthy)
            tl.store(record + SCALE_SUM, wide)
            tl.store(record + SCALE_SQUARES, wide * wide)
            tl.store(record + SCALE_MIN, tl.where(healthy > 0, wide, float("inf")))
            tl.store(record + SCALE_MAX, tl.where(healthy > 0, wide, -float("inf")))
        if again:
            recount(
                record, x_ptr, M, K, x_stride_m, x_stride_k, row0, STEPS * ROWS, segment * 2 * WORDS,
                inverse, MAX * MARGIN, C, 2 * WORDS, 2 * RUN,
            )  # fmt: skip
        if GIVEN:
            tl.atomic_max(scratch_ptr, largest, sem="relaxed")
            if tl.atomic_add(scratch_ptr + 1, 1, sem="acq_rel") == P - 1:
                bits = tl.atomic_xchg(scratch_ptr, 0, sem="relaxed")
                tl.atomic_xchg(scratch_ptr + 1, 0, sem="relaxed")
                amax = bits.to(tl.float32, bitcast=True)
                tl.store(amax_ptr, amax)
                ratio = tl.math.div_rn(amax, given * GOAL)  # to the amax that the scale assumed
                tl.store(room_ptr + FIELDS * P + ERRORS * errors + GROUP * samples, ratio.to(tl.float64))
                tl.store(scale_ptr, tl.where(usable & (amax < float("inf")), given, float("nan")))
                if SLOT:
                    tl.atomic_max(slot_ptr, bits, mask=amax < float("inf"), sem="relaxed")


class _Watched:
    """A cast of all matrices that lie in memory as `x_MK` does, for looks of one plan.

    `given`: whether the scale is; `seen`: whether a slot is to hear of the amax.
    """

    def __init__(
        self, x_MK: Tensor, rule: Operand, plan: Plan, plain: bool, turned: bool, given: bool, seen: bool
    ) -> None:
        M, K = x_MK.shape
        W, stride_m, stride_w, kind = words(x_MK)
        self._fmt, self._plain, self._turned = rule.fmt, plain, turned
        numbers = *facts(rule.fmt, rule.scaling, rule.margin), half_step(rule.fmt)
        constants = (
            kind, *numbers, plain, turned, given, seen, INTERPRETED, plan.walk.rows, WORDS, plan.steps, RUN,
            plan.error_lines, RECOUNTED, FIELDS, ERRORS, GROUP, SAMPLE_ROWS, RANGE_BLOCK, COUNTS,
        )  # fmt: skip
        self._launch = Launch(
            _watched, plan.samples + plan.errors + plan.programs, (M, K, W, stride_m, stride_w, *x_MK.stride()),
            constants, num_warps=WARPS, maxnreg=registers(kind, REGISTERS),
        )  # fmt: skip

    def _number(self, x_MK: Tensor, own: Tensor) -> Tensor:
        """Where a number [] goes: into the look's own room where there are no codes that it is to go with."""
        return number(x_MK) if self._plain or self._turned else own


class WatchedCast(_Watched):
    """`cast` of all matrices that lie in memory as `x_MK` does."""

    def __init__(self, x_MK: Tensor, rule: Operand, plan: Plan, plain: bool, turned: bool) -> None:
        super().__init__(x_MK, rule, plan, plain, turned, given=False, seen=False)

    def __call__(self, x_MK: Tensor, look: Look, amax: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """As `tensorwise.cast`, filling `look`."""
        codes_MK, codes_KM = room(x_MK, self._fmt, self._plain, self._turned)
        scale = self._number(x_MK, look.own)
        tensors = (x_MK, amax, None, None, codes_MK, codes_KM, scale, None, None, *look.pointers)
        self._launch(tensors, look.numbers)
        return codes_MK, codes_KM, scale

    def again(self, x_MK: Tensor, look: Look, amax: Tensor) -> Again | None:
        """The same where no codes are made, for what lies as x_MK does."""
        return self._launch.again((x_MK, amax, None, None, None, None, look.own, None, None, *look.pointers))


class WatchedGiven(_Watched):
    """`cast_given` of all matrices that lie in memory as `x_MK` does."""

    def __init__(self, x_MK: Tensor, rule: Operand, plan: Plan, plain: bool, turned: bool, seen: bool) -> None:
        super().__init__(x_MK, rule, plan, plain, turned, given=True, seen=seen)

    def __call__(
        self,
        x_MK: Tensor,
        look: Look,
        scale: Tensor | None,
        inv_scale: Tensor,
        slot: Tensor | None,
        scratch: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
        """As `tensorwise.cast_given`, filling `look`; a scale of None is 1 / inv_scale."""
        codes_MK, codes_KM = room(x_MK, self._fmt, self._plain, self._turned)
        own, amax = self._number(x_MK, look.own), self._number(x_MK, look.amax)
        if scratch is None:
            scratch = torch.zeros(2, dtype=torch.int32, device=x_MK.device)
        tensors = (x_MK, amax, scale, inv_scale, codes_MK, codes_KM, own, slot, scratch, *look.pointers)
        self._launch(tensors, look.numbers)
        return codes_MK, codes_KM, own, amax

    def again(self, x_MK: Tensor, look: Look, scale: Tensor | None, inv_scale: Tensor) -> Again | None:
        """The same where no codes are made and nobody hears of the amax, for what lies as x_MK does."""
        tensors = x_MK, look.amax, scale, inv_scale, None, None, look.own, None, look.scratch, *look.pointers
        return self._launch.again(tensors)


def cast(
    x_MK: Tensor, rule: Operand, amax: Tensor, *, look: Look, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """As `tensorwise.cast`, filling `look`."""
    return WatchedCast(x_MK, rule, look.plan, plain, turned)(x_MK, look, amax)


def cast_given(
    x_MK: Tensor,
    rule: Operand,
    scale: Tensor,
    inv_scale: Tensor,
    *,
    look: Look,
    plain: bool = True,
    turned: bool = True,
    slot: Tensor | None = None,
    scratch: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """As `tensorwise.cast_given`, filling `look`."""
    made = WatchedGiven(x_MK, rule, look.plan, plain, turned, slot is not None)
    return made(x_MK, look, scale, inv_scale, slot, scratch)
