"""The moments of a gemm's result in one read: counts, amax, sum and sum of squares, merged by the last program.

    n, nan, inf    counts                 mean = s / n        s = sum of the finite y
    amax           over the finite y      M2   = q - s^2 / n  q = sum of their squares

In float64 throughout, which these GPUs add half as fast as float32 and memory feeds far slower: nothing overflows, and
a mean a million times the spread leaves four digits of it.

Legend: P = programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.rules import widen
from narrowgauge.metrics import MOMENTS

BLOCK = 2048
PROGRAMS = 4096  # at most, for one of them merges what all have found
SUMS = 5  # n, nan, inf, s, q


@triton.jit
def _result(
    y_ptr, partial_ptr, amax_ptr, count_ptr, out_ptr, n, BLOCK: tl.constexpr, RUNS: tl.constexpr,
    WIDE: tl.constexpr, NUMEL: tl.constexpr, NANS: tl.constexpr, INFS: tl.constexpr, AMAX: tl.constexpr,
    N: tl.constexpr, MEAN: tl.constexpr, M2: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0)
    first = tl.program_id(0).to(tl.int64) * BLOCK * RUNS
    s, q = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    finite, nans = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    seen, largest = tl.zeros((BLOCK,), tl.int32), tl.full((BLOCK,), -1, tl.int32)
    for run in range(RUNS):
        at = first + run * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        y = widen(tl.load(y_ptr + at, mask=inside, other=0.0))
        bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        good = inside & (bits < 0x7F800000)
        largest = tl.maximum(largest, tl.where(good, bits, -1))
        v = tl.where(good, y, 0.0).to(tl.float64)
        s += v
        q += v * v
        finite += good.to(tl.int32)
        nans += (inside & (bits > 0x7F800000)).to(tl.int32)
        seen += inside.to(tl.int32)
    mine = partial_ptr + tl.program_id(0)
    tl.store(mine, tl.sum(finite, 0).to(tl.float64))
    tl.store(mine + P, tl.sum(nans, 0).to(tl.float64))
    tl.store(mine + 2 * P, (tl.sum(seen, 0) - tl.sum(finite, 0) - tl.sum(nans, 0)).to(tl.float64))
    tl.store(mine + 3 * P, tl.sum(s, 0))
    tl.store(mine + 4 * P, tl.sum(q, 0))
    tl.atomic_max(amax_ptr, tl.max(largest, 0), sem="relaxed")
    tl.debug_barrier()  # all of this program's numbers are out before it says so
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == P - 1:
        at = tl.arange(0, WIDE)
        here = at < P
        n_all = tl.sum(tl.load(partial_ptr + at, mask=here, other=0.0, volatile=True), 0)
        nan_all = tl.sum(tl.load(partial_ptr + P + at, mask=here, other=0.0, volatile=True), 0)
        inf_all = tl.sum(tl.load(partial_ptr + 2 * P + at, mask=here, other=0.0, volatile=True), 0)
        s_all = tl.sum(tl.load(partial_ptr + 3 * P + at, mask=here, other=0.0, volatile=True), 0)
        q_all = tl.sum(tl.load(partial_ptr + 4 * P + at, mask=here, other=0.0, volatile=True), 0)
        bits = tl.atomic_max(amax_ptr, -1, sem="relaxed")
        mean = s_all / tl.maximum(n_all, 1.0)
        amax = tl.where(bits < 0, -float("inf"), bits.to(tl.float32, bitcast=True)).to(tl.float64)
        tl.store(out_ptr + NUMEL, n_all + nan_all + inf_all)
        tl.store(out_ptr + NANS, nan_all)
        tl.store(out_ptr + INFS, inf_all)
        tl.store(out_ptr + AMAX, amax)
        tl.store(out_ptr + N, n_all)
        tl.store(out_ptr + MEAN, mean)
        tl.store(out_ptr + M2, tl.maximum(q_all - s_all * mean, 0.0))


def look_at_result(y: Tensor, out: Tensor) -> None:
    """Write the moments of a contiguous tensor of 16 or 32 bits into a neutral head [head_width] float64."""
    n = y.numel()
    if not n:
        return
    runs = max(4, triton.next_power_of_2(triton.cdiv(n, BLOCK * PROGRAMS)))
    programs = triton.cdiv(n, BLOCK * runs)
    partial = torch.empty(SUMS * programs, dtype=torch.float64, device=y.device)
    small = torch.full((2,), -1, dtype=torch.int32, device=y.device)
    small[1:].zero_()
    at = MOMENTS.offsets
    _result[(programs,)](
        y, partial, small, small[1:], out, n, BLOCK, runs, triton.next_power_of_2(programs),
        at["numel"], at["nan_count"], at["inf_count"], at["amax"], at["n"], at["mean"], at["m2"], num_warps=8,
    )  # fmt: skip
