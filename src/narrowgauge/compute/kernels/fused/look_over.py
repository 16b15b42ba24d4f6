"""A look at a tensor that has been quantized: everything that the packed moments need, in one more read of it.

    scale_ij    of the grain that holds x_ij            [M / grain_M, K / grain_K]
    v = x / scale_00                                    for the sums, which go back to x's units in float64

For scales by block or by row. They are known when the look begins, so any program can compare any row with its codes,
which it makes once more. What lies under a scale that is not finite is counted, and not compared.

Legend: M = rows, K = columns, W = ceil(K / 2) words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.looks import Look
from narrowgauge.compute.kernels.fused.moments import (
    AMAX,
    FIELDS,
    INFS,
    NANS,
    SATURATED,
    SCALE_MAX,
    SCALE_MIN,
    SCALE_N,
    SCALE_SQUARES,
    SCALE_SUM,
    SCALED,
    add_amax,
    add_own,
    close_amax,
    close_own,
    flush_limit,
    nothing_yet,
    packed_limit,
    recount,
)
from narrowgauge.compute.kernels.fused.plan import EVERY, LATE, RECOUNTED, REGISTERS, ROWS, RUN, SEGMENT
from narrowgauge.compute.kernels.fused.rules import INTERPRETED
from narrowgauge.compute.kernels.fused.sampling import (
    COUNTS,
    ERRORS,
    GROUP,
    SAMPLE_ROWS,
    look_at_errors,
    look_at_sample,
    scales_at,
)
from narrowgauge.compute.kernels.fused.tile import BF16, high, load, low, words
from narrowgauge.formats import Format
from narrowgauge.metrics.bins import RANGE_BLOCK

WHOLE = 1 << 30  # columns of a grain that is a row
WORDS = SEGMENT // 2  # of a tile with ROWS rows


@triton.jit(do_not_specialize=["scale_stride_m", "scale_stride_k", *LATE])
def _look_over(
    x_ptr, scale_ptr, scale_stride_m, scale_stride_k, room_ptr, rows_ptr, columns_ptr, counts_ptr,
    M, K, W, stride_m, stride_w, x_stride_m, x_stride_k,
    samples, errors, lines, segments, first, stride, sampled, group, phase,
    GRAIN_M: tl.constexpr, GRAIN_K: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr,
    HALF: tl.constexpr, INTERPRET: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
    RUN: tl.constexpr, LINES: tl.constexpr, C: tl.constexpr, EVERY: tl.constexpr, FIELDS: tl.constexpr,
    ERRORS: tl.constexpr, GROUP: tl.constexpr, SAMPLE_ROWS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    P = tl.num_programs(0) - samples - errors
    inv_scale = scales_at(scale_ptr, True)[1]
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
            x_ptr, M, K, stride_m, stride_w, band * LINES, segment * WORDS, group, phase,
            inv_scale, unit, scale_ptr, scale_stride_m, scale_stride_k, GRAIN_M, GRAIN_K,
            KIND, MANTISSA, MAX, INTERPRET, EVERY, LINES, C, WORDS,
        )  # fmt: skip
    else:
        at = P - 1 - (pid - samples - errors)  # backwards: the cache may still hold the end
        band, segment = at // segments, at % segments
        row0 = band * STEPS * ROWS
        record = room_ptr + at
        w = (segment * WORDS + tl.arange(0, WORDS)).to(tl.int64)
        m = (row0 + tl.arange(0, ROWS)).to(tl.int64)
        rows, columns = tl.minimum(STEPS * ROWS, M - row0), tl.minimum(2 * WORDS, K - segment * 2 * WORDS)
        mine = scale_ptr + segment * 2 * WORDS // GRAIN_K * scale_stride_k
        whole = segment * 2 * WORDS % GRAIN_K == 0  # each scale counts once
        s, q, least, flushed = nothing_yet(ROWS, WORDS // RUN, KIND, INTERPRET)
        top = tl.zeros((ROWS, WORDS // RUN), tl.int32)
        healthy_rows = tl.zeros((ROWS,), tl.int32)
        count, total, squares = (
            tl.zeros((ROWS,), tl.float64),
            tl.zeros((ROWS,), tl.float64),
            tl.zeros((ROWS,), tl.float64),
        )
        smallest, largest = tl.full((ROWS,), float("inf"), tl.float32), tl.full((ROWS,), -float("inf"), tl.float32)
        for _ in range(STEPS):
            a, b = load(x_ptr, m, w, row0 + rows, K, W, stride_m, stride_w, KIND)
            inside = m < M
            scale, inverse, healthy = scales_at(mine + m // GRAIN_M * scale_stride_m, inside)
            limit = packed_limit(tl.where(healthy, flush_limit(inverse, HALF), 0), KIND, INTERPRET)[:, None, None]
            va, vb = low(a, KIND) * inv_scale, high(b, KIND) * inv_scale
            s, q, least, flushed = add_own(s, q, least, flushed, a, b, va, vb, limit, RUN, KIND, INTERPRET)
            top = add_amax(top, a, b, RUN, KIND, INTERPRET)
            healthy_rows += (inside & healthy).to(tl.int32)
            counted = inside & healthy & whole & (m % GRAIN_M == 0)
            wide = tl.where(counted, scale, 0.0).to(tl.float64)
            count += counted.to(tl.float64)
            total += wide
            squares += wide * wide
            smallest = tl.minimum(smallest, tl.where(counted, scale, float("inf")))
            largest = tl.maximum(largest, tl.where(counted, scale, -float("inf")))
            m += ROWS
        again = close_own(record, P, s, q, least, flushed, rows * columns, unit, KIND, INTERPRET)
        amax = close_amax(top, KIND, INTERPRET).to(tl.float32, bitcast=True)
        tl.store(record + AMAX * P, amax.to(tl.float64))
        tl.store(record + SATURATED * P, 0.0)  # a scale of its own holds every number
        tl.store(record + NANS * P, 0.0)
        tl.store(record + INFS * P, 0.0)
        tl.store(record + SCALED * P, (tl.sum(healthy_rows, 0) * columns).to(tl.float64))
        tl.store(record + SCALE_N * P, tl.sum(count, 0))
        tl.store(record + SCALE_SUM * P, tl.sum(total, 0))
        tl.store(record + SCALE_SQUARES * P, tl.sum(squares, 0))
        tl.store(record + SCALE_MIN * P, tl.min(smallest, 0).to(tl.float64))
        tl.store(record + SCALE_MAX * P, tl.max(largest, 0).to(tl.float64))
        if at == 0:
            tl.store(room_ptr + FIELDS * P + ERRORS * errors + GROUP * samples, -float("inf"))  # no ratio
        if again | ((amax < float("inf")) == 0):
            recount(
                record, P, x_ptr, M, K, x_stride_m, x_stride_k, row0, STEPS * ROWS, segment * 2 * WORDS,
                1.0, float("inf"), C, 2 * WORDS, 2 * RUN,
            )  # fmt: skip


def look_over(x_MK: Tensor, look: Look, fmt: Format, scale: Tensor, grain: tuple[int, int]) -> None:
    """Fill a look at a tensor and its codes.

    Args:
        x_MK: what was quantized.
        look: opened for it.
        fmt: the codes' format.
        scale: [ceil(M / grain rows), ceil(K / grain columns)] float32, each from the amax of its grain.
        grain: rows and columns under one scale; the columns are a multiple of 128, or WHOLE.
    """
    W, stride_m, stride_w, kind = words(x_MK)
    M, K = x_MK.shape
    plan = look.plan
    half = 2.0 ** (1 - fmt.bias - fmt.mantissa_bits) / 2
    _look_over[(plan.samples + plan.errors + plan.programs,)](
        x_MK, scale, *scale.stride(), *look.pointers, M, K, W, stride_m, stride_w, *x_MK.stride(), *look.numbers,
        *grain, kind,
        fmt.mantissa_bits, fmt.max, half, INTERPRETED, ROWS, WORDS, plan.steps, RUN, plan.error_lines, RECOUNTED, EVERY,
        FIELDS, ERRORS, GROUP, SAMPLE_ROWS, RANGE_BLOCK, COUNTS, num_warps=4,
        maxnreg=REGISTERS if kind >= BF16.value else None,
    )  # fmt: skip
