"""`blocks`, watched: the same codes and scales, and what the packed moments need, in the same launch.

    programs      the first few    a sample of rows: histograms, kurtosis
                  then             errors of a share of the rows
                  then             codes of everything, with amax, amin, sums and counts of everything

A program that casts walks down a few tiles. It takes a tile as a whole, for what needs all of its rows: the amaxes of
its columns, or its own, and the turned codes. Then it takes it again, a few rows at a time, for plain codes and counts:
these need so many registers that a tile has no room beside them, and its numbers are still in the cache.

What is counted are plain codes under plain scales, even where only the turned ones are asked for. The errors of squares
are looked at in a small launch of its own, because one row's errors need the scale of 128.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Again, Launch
from narrowgauge.compute.kernels.fused.room import facts, half_step, matrix, room, turned_matrix
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, inv_scale_of, scale_of
from narrowgauge.compute.kernels.fused.tile import (
    SIDE,
    column_amaxes,
    copied,
    even,
    load,
    registers,
    row_amaxes,
    store_plain,
    store_turned,
    store_where_it_lies,
    tile_amax,
)
from narrowgauge.compute.kernels.fused.watched.errors import ERRORS, look_at_errors
from narrowgauge.compute.kernels.fused.watched.grains import (
    SQUARES,
    TILES,
    add_scales,
    close_grained,
    close_lines,
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
from narrowgauge.compute.kernels.fused.watched.plan import LATE, RECOUNTED, RUN, SEGMENT, Plan
from narrowgauge.compute.kernels.fused.watched.sampling import COUNTS, GROUP, SAMPLE_ROWS, look_at_sample
from narrowgauge.compute.kernels.fused.watched.square_errors import SquareErrors
from narrowgauge.compute.kernels.fused.watched.sums import add_own, nothing_yet, packed_limit
from narrowgauge.compute.recipes import Operand
from narrowgauge.metrics.bins import RANGE_BLOCK

WORDS = SEGMENT // 2  # of a tile
PIECE = 32  # rows of a tile that are counted together
WARPS, REGISTERS = 4, 128  # of a program, and of a thread where numbers have 16 bits


@triton.jit(do_not_specialize=LATE)
def _watched_blocks(
    x_ptr, plain_ptr, plain_scale_ptr, turned_ptr, turned_scale_ptr, bits_ptr,
    room_ptr, rows_ptr, columns_ptr, counts_ptr, M, K, W, stride_m, stride_w, x_stride_m, x_stride_k,
    samples, errors, lines, segments, first, stride, sampled, share, phase,
    GRAIN: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, GOAL: tl.constexpr,
    POW2: tl.constexpr, FLOOR: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr,
    INTERPRET: tl.constexpr, SIDE: tl.constexpr, PIECE: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
    RUN: tl.constexpr, TAKE: tl.constexpr, C: tl.constexpr, FIELDS: tl.constexpr, ERRORS: tl.constexpr,
    GROUP: tl.constexpr, SAMPLE_ROWS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    others = samples
    if GRAIN == TILES:
        others += errors
    P = tl.num_programs(0) - others
    if pid < samples:
        look_at_sample(
            room_ptr + FIELDS * P + ERRORS * errors, counts_ptr, samples, x_ptr, M, K, x_stride_m, x_stride_k,
            first, stride, sampled, tl.cdiv(K, BLOCK), SAMPLE_ROWS, BLOCK, COUNTS,
        )  # fmt: skip
    elif pid < others:  # never, for squares
        at = pid - samples
        band, segment = at // segments, at % segments
        inv_unit = common_inverse(
            None, x_ptr, M, K, W, stride_m, stride_w, TILES, C, WORDS, KIND, GOAL, POW2, FLOOR, INTERPRET
        )
        look_at_errors(
            room_ptr + FIELDS * P + at, errors, rows_ptr + segment * 2 * lines, columns_ptr + band * 2 * K, lines,
            x_ptr, M, K, W, stride_m, stride_w, band * TAKE, segment * WORDS, share, phase,
            inv_unit, 1.0 / inv_unit.to(tl.float64), None, 0, TILES, KIND, MANTISSA, MAX, GOAL, POW2, FLOOR,
            INTERPRET, TAKE, C, WORDS, RUN,
        )  # fmt: skip
    else:
        at = P - 1 - (pid - others)  # backwards: the cache may still hold the end
        band, segment = at // segments, at % segments
        row0 = band * STEPS * SIDE
        record = room_ptr + FIELDS * at
        rows, columns = tl.minimum(STEPS * SIDE, M - row0), tl.minimum(2 * WORDS, K - segment * 2 * WORDS)
        v = segment * WORDS + tl.arange(0, WORDS)
        w = v.to(tl.int64)
        SCALES: tl.constexpr = PIECE if GRAIN == TILES else 1  # met at once
        s, q, least, flushed = nothing_yet(PIECE, WORDS, RUN, KIND, INTERPRET)
        top, scaled = tl.zeros((SCALES,), tl.int32), tl.zeros((SCALES,), tl.int32)
        count, total, squares, smallest, largest = no_scales(SCALES)
        step = tl.zeros_like(rows)
        if GRAIN == SQUARES:
            while step < tl.cdiv(rows, SIDE):
                tile_m = band * STEPS + step
                m = (tile_m * SIDE + tl.arange(0, SIDE)).to(tl.int64)
                a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
                bits = tl.full((1,), 0, tl.int32) + tile_amax(a, b, KIND, INTERPRET)
                amax = bits.to(tl.float32, bitcast=True)
                inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
                scale, healthy = scale_of(amax, inv_scale, POW2), amax < float("inf")
                square = tile_m * segments + segment + tl.arange(0, 1)
                tl.store(plain_scale_ptr + square, scale)
                tl.store(bits_ptr + square, bits)
                top = tl.maximum(top, bits)
                scaled += tl.where(healthy, tl.minimum(SIDE, M - tile_m * SIDE), 0)
                count, total, squares, smallest, largest = add_scales(
                    count, total, squares, smallest, largest, scale, healthy
                )
                inv = inv_scale[:, None]
                if TURNED:
                    store_turned(turned_ptr, a, b, inv, inv, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
                limit = flush_limit_of(scale, inv_scale, HALF, POW2)
                limit = packed_limit(tl.where(healthy, limit, 0), KIND, INTERPRET)[:, None]
                for piece in range(SIDE // PIECE):
                    i = (tile_m * SIDE + piece * PIECE + tl.arange(0, PIECE)).to(tl.int64)
                    c, d = load(x_ptr, i, w, M, K, W, stride_m, stride_w, KIND)
                    if PLAIN:
                        store_plain(plain_ptr, c, d, inv, i, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
                    s, q, least, flushed = add_own(s, q, least, flushed, c, d, limit, RUN, KIND, INTERPRET)
                step += 1
        else:
            if TURNED:
                m = (row0 + tl.arange(0, SIDE)).to(tl.int64)
                a, b = load(x_ptr, m, w, M, K, W, stride_m, stride_w, KIND)
                evens, odds = column_amaxes(a, b, KIND, INTERPRET, LOOSE=True)
                inv_low, inv_high = turned_scales(
                    turned_scale_ptr + band * K, evens, odds, v, K, W, True, GOAL, POW2, FLOOR
                )
                inv_low, inv_high = inv_low[:, None], inv_high[:, None]
                store_turned(turned_ptr, a, b, inv_low, inv_high, m, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
            i = row0 + tl.arange(0, PIECE)
            next_c, next_d = load(x_ptr, i.to(tl.int64), w, M, K, W, stride_m, stride_w, KIND)
            while step < tl.cdiv(rows, PIECE):
                c, d = next_c, next_d  # the next lines are on their way while these are worked on
                more = tl.where(step + 1 < tl.cdiv(rows, PIECE), M, 0)
                r, inside = i.to(tl.int64), i < M
                next_c, next_d = load(x_ptr, r + PIECE, w, more, K, W, stride_m, stride_w, KIND)
                bits = row_amaxes(c, d, KIND, INTERPRET)
                amax = bits.to(tl.float32, bitcast=True)
                inv_scale = inv_scale_of(amax, GOAL, POW2, FLOOR)
                scale, healthy = scale_of(amax, inv_scale, POW2), amax < float("inf")
                if PLAIN:
                    store_where_it_lies(plain_scale_ptr + segment * M + i, scale, inside, INTERPRET)
                    inv = inv_scale[:, None]
                    store_plain(plain_ptr, c, d, inv, r, w, M, K, W, KIND, MANTISSA, MAX, INTERPRET)
                top = tl.maximum(top, bits)
                count, total, squares, smallest, largest = add_scales(
                    count, total, squares, smallest, largest, scale, healthy & inside
                )
                limit = flush_limit_of(scale, inv_scale, HALF, POW2)
                limit = packed_limit(tl.where(healthy, limit, 0), KIND, INTERPRET)[:, None]
                s, q, least, flushed = add_own(s, q, least, flushed, c, d, limit, RUN, KIND, INTERPRET)
                i += PIECE
                step += 1
        n = rows * columns
        if GRAIN == TILES:
            again, healthy_rows, top = close_lines(
                record, s, q, least, flushed, n, count, total, squares, smallest, largest, top,
                RUN, KIND, INTERPRET,
            )  # fmt: skip
        else:
            again = close_own(record, s, q, least, flushed, n, RUN, KIND, INTERPRET)
            close_scales(record, count, total, squares, smallest, largest)
            healthy_rows, top = tl.max(scaled, 0), tl.max(top, 0)
        known = top.to(tl.float32, bitcast=True)
        ratio_ptr = room_ptr + FIELDS * P + ERRORS * errors + GROUP * samples
        close_grained(record, known, healthy_rows, columns, at, ratio_ptr)
        if again | ((known < float("inf")) == 0):
            recount(
                record, x_ptr, M, K, x_stride_m, x_stride_k, row0, STEPS * SIDE, segment * 2 * WORDS,
                1.0, float("inf"), C, 2 * WORDS, 2 * RUN,
            )  # fmt: skip


class _WatchedBlocks:
    """A cast by blocks of all matrices that lie in memory as `x_MK` does, for looks of one plan."""

    def __init__(self, grain: int, x_MK: Tensor, rule: Operand, plan: Plan, plain: bool, turned: bool) -> None:
        M, K = x_MK.shape
        x, W, stride_m, stride_w, kind = even(x_MK)
        self._fmt, self._plain, self._turned, self._copies = rule.fmt, plain, turned, x is not x_MK
        self._blocks_M, self._blocks_K = triton.cdiv(M, SIDE), triton.cdiv(K, SIDE)
        numbers = *facts(rule.fmt, rule.scaling, rule.margin), half_step(rule.fmt)
        others = plan.samples if grain == SQUARES.value else plan.samples + plan.errors
        constants = (
            grain, kind, *numbers, plain, turned, INTERPRETED, SIDE, PIECE, WORDS, plan.steps, RUN, plan.error_lines,
            RECOUNTED, FIELDS, ERRORS, GROUP, SAMPLE_ROWS, RANGE_BLOCK, COUNTS,
        )  # fmt: skip
        self._launch = Launch(
            _watched_blocks, others + plan.programs, (M, K, W, stride_m, stride_w, *x.stride()), constants,
            num_warps=WARPS, maxnreg=registers(kind, REGISTERS),
        )  # fmt: skip

    def _words(self, x_MK: Tensor) -> Tensor:
        return copied(x_MK) if self._copies else x_MK


class WatchedTiles(_WatchedBlocks):
    """`cast_tiles` of all matrices that lie in memory as `x_MK` does."""

    def __init__(self, x_MK: Tensor, rule: Operand, plan: Plan, plain: bool, turned: bool) -> None:
        super().__init__(TILES.value, x_MK, rule, plan, plain, turned)

    def __call__(self, x_MK: Tensor, look: Look) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """As `blocks.cast_tiles`, filling `look`."""
        M, K = x_MK.shape
        codes_MK, codes_KM = room(x_MK, self._fmt, self._plain, self._turned)
        scale_M = turned_matrix(M, self._blocks_K, x_MK) if self._plain else None
        scale_K = turned_matrix(K, self._blocks_M, x_MK) if self._turned else None
        tensors = (self._words(x_MK), codes_MK, scale_M, codes_KM, scale_K, None, *look.pointers)
        self._launch(tensors, look.numbers)
        return codes_MK, scale_M, codes_KM, scale_K

    def again(self, x_MK: Tensor, look: Look) -> Again | None:
        """The same where no codes are made, for what lies as x_MK does; None where that has to be copied first."""
        return None if self._copies else self._launch.again((x_MK, *[None] * 5, *look.pointers))


class WatchedSquares(_WatchedBlocks):
    """`cast_squares` of all matrices that lie in memory as `x_MK` does."""

    def __init__(self, x_MK: Tensor, rule: Operand, plan: Plan, plain: bool, turned: bool) -> None:
        super().__init__(SQUARES.value, x_MK, rule, plan, plain, turned)
        self._errors = SquareErrors(even(x_MK)[0], rule, plan)

    def __call__(self, x_MK: Tensor, look: Look) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """As `blocks.cast_squares`, filling `look`."""
        codes_MK, codes_KM = room(x_MK, self._fmt, self._plain, self._turned)
        scale, bits = (matrix(self._blocks_M, self._blocks_K, x_MK) for _ in range(2))
        x, bits = self._words(x_MK), bits.view(torch.int32)
        self._launch((x, codes_MK, scale, codes_KM, None, bits, *look.pointers), look.numbers)
        self._errors(x, bits, look)
        return codes_MK, codes_KM, scale

    def again(self, x_MK: Tensor, look: Look) -> Again | None:
        """The same where no codes are made, for what lies as x_MK does; None where that has to be copied first."""
        if self._copies:
            return None
        scale, bits = (matrix(self._blocks_M, self._blocks_K, x_MK) for _ in range(2))
        bits = bits.view(torch.int32)
        counts = self._launch.again((x_MK, None, scale, None, None, bits, *look.pointers))
        errors = self._errors.again(x_MK, bits, look)
        return None if counts is None or errors is None else counts.then(errors)


def cast_tiles(
    x_MK: Tensor, rule: Operand, *, look: Look, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As `blocks.cast_tiles`, filling `look`."""
    return WatchedTiles(x_MK, rule, look.plan, plain, turned)(x_MK, look)


def cast_squares(
    x_MK: Tensor, rule: Operand, *, look: Look, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """As `blocks.cast_squares`, filling `look`."""
    return WatchedSquares(x_MK, rule, look.plan, plain, turned)(x_MK, look)
