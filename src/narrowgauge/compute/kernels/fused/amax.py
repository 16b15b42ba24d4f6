"""amax of a tensor in one read: every program takes runs of it, and one atomic maximum of bits joins them.

    amax = max |x|        as bits, so that a NaN wins over an Inf and an Inf over every number

4 TB/s is the limit of an H200's memory; each program therefore loads 16 bytes per thread, many times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.rules import magnitude_bits, widen

BLOCK = 8192
RUNS = 8  # blocks per program


@triton.jit
def _amax(x_ptr, out_ptr, n, BLOCK: tl.constexpr, RUNS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK * RUNS
    largest = tl.zeros((BLOCK,), tl.int32)
    for run in range(RUNS):
        at = first + run * BLOCK + tl.arange(0, BLOCK)
        x = widen(tl.load(x_ptr + at, mask=at < n, other=0.0))
        largest = tl.maximum(largest, magnitude_bits(x))
    tl.atomic_max(out_ptr, tl.max(largest, 0))


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a contiguous tensor of any shape, [] float32; NaN if there is one; 0 of nothing."""
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    n = x.numel()
    if n:
        _amax[(triton.cdiv(n, BLOCK * RUNS),)](x, out, n, BLOCK, RUNS, num_warps=8)
    return out.view(torch.float32)
