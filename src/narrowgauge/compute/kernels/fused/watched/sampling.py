"""What is taken from a sample of the rows, in the launch that quantizes them all.

    rows first + i * stride      central moments to the fourth, exponents, ranges of blocks of 128 columns

It is the work of programs of their own, which come first: the other programs need not hold their registers, and nothing
has to wait at the end.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.rules import widen
from narrowgauge.metrics.bins import EXPONENT_BINS, EXPONENT_LOW, RANGE_BINS, RANGE_BLOCK

LOW = Constant(EXPONENT_LOW + 127)  # the exponent field of bin 1
TOP = Constant(EXPONENT_BINS - 2)
LAST = Constant(RANGE_BINS - 1)
BLOCK = Constant(RANGE_BLOCK)
EXPONENTS = Constant(EXPONENT_BINS)
RANGES = Constant(64)  # room for RANGE_BINS: a histogram's bins are a power of two
COUNTS = EXPONENT_BINS + 64  # numbers that a program of the sample counts
GROUP = 5  # n, mean, M2, M3, M4
SAMPLE_ROWS = 16  # rows of such a program


@triton.jit
def look_at_sample(
    group_ptr, counts_ptr, samples, x_ptr, M, K, stride_m, stride_k, first, stride, taken, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Block `pid` of the sampled rows: its central moments, exponents and ranges.

    Args:
        group_ptr: GROUP float64 numbers, `samples` apart.
        counts_ptr: COUNTS int32 numbers per program.
        first, stride, taken: the sampled rows are first + i * stride, i below `taken`.
        blocks: runs of 128 columns per row.
    """
    pid = tl.program_id(0)
    i = pid // blocks * ROWS + tl.arange(0, ROWS)
    m = (first + i * stride).to(tl.int64)
    k = (pid % blocks * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    inside = (i < taken)[:, None] & (k[None, :] < K)
    x = widen(tl.load(x_ptr + m[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0.0))
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    counted = inside & (bits < 0x7F800000)
    bits = tl.where(counted, bits, 0)

    binade = tl.minimum(tl.maximum((bits >> 23) - LOW, 0), TOP) + 1
    exponents = tl.histogram(tl.reshape(tl.where(bits == 0, 0, binade), (ROWS * WIDTH,)), EXPONENTS,
                             mask=tl.reshape(counted, (ROWS * WIDTH,)))  # fmt: skip
    tl.store(counts_ptr + pid * COUNTS + tl.arange(0, EXPONENTS), exponents)
    magnitude = bits.to(tl.float32, bitcast=True)
    ratio = tl.math.div_rn(
        tl.max(magnitude, 1)[:, None] + tl.zeros_like(magnitude), tl.where(bits == 0, 1.0, magnitude)
    )
    binade = (ratio.to(tl.int32, bitcast=True) >> 23) - 127
    ranged = counted & (bits != 0) & (binade < 128)  # beyond, the quotient is infinite
    ranges = tl.histogram(tl.reshape(tl.minimum(tl.maximum(binade, 0), LAST), (ROWS * WIDTH,)), RANGES,
                          mask=tl.reshape(ranged, (ROWS * WIDTH,)))  # fmt: skip
    tl.store(counts_ptr + pid * COUNTS + EXPONENTS + tl.arange(0, RANGES), ranges)

    n = tl.sum(tl.sum(counted.to(tl.int32), 1), 0).to(tl.float64)
    wide = tl.where(counted, x, 0.0).to(tl.float64)
    mean = tl.sum(tl.sum(wide, 1), 0) / tl.maximum(n, 1.0)
    p = tl.where(counted, wide - mean, 0.0)
    square = p * p
    tl.store(group_ptr + pid, n)
    tl.store(group_ptr + samples + pid, mean)
    tl.store(group_ptr + 2 * samples + pid, tl.sum(tl.sum(square, 1), 0))
    tl.store(group_ptr + 3 * samples + pid, tl.sum(tl.sum(square * p, 1), 0))
    tl.store(group_ptr + 4 * samples + pid, tl.sum(tl.sum(square * square, 1), 0))
