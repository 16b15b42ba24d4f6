"""amax of a tensor in one read and one launch: programs stride over it, and one atomic maximum of bits joins them.

    amax = max |x|        as bits, so that a NaN wins over an Inf and an Inf over every number

16-bit numbers are compared two at a time, as they lie in memory. As many programs are launched as run at once; each
counts itself when it is done, and the last writes what all have found.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.rules import INTERPRETED, magnitude_bits, widen
from narrowgauge.compute.kernels.fused.tile import ANY, high, larger_halves, low

BLOCK, WARPS = 8192, 8  # numbers or pairs of numbers per program and round
PER_SM, REGISTERS = 4, 64  # programs of that many warps that run at once on a multiprocessor


@triton.jit
def _amax(x_ptr, scratch_ptr, out_ptr, n, KIND: tl.constexpr, INTERPRET: tl.constexpr, BLOCK: tl.constexpr):
    largest = tl.zeros((BLOCK,), tl.int32)
    if KIND != ANY:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        at = first + tl.arange(0, BLOCK)
        if KIND == ANY:
            largest = tl.maximum(largest, magnitude_bits(widen(tl.load(x_ptr + at, mask=at < n, other=0.0))))
        else:
            both = tl.load(x_ptr + at, mask=at < n, other=0)
            if INTERPRET:
                found = tl.maximum(magnitude_bits(low(both, KIND)), magnitude_bits(high(both, KIND)))
                largest = tl.maximum(largest, found)
            else:
                largest = larger_halves(largest, both & 0x7FFF7FFF)
        first += tl.num_programs(0).to(tl.int64) * BLOCK
    if KIND == ANY or INTERPRET:
        bits = tl.max(largest, 0)
    else:
        both = tl.reduce(largest, 0, larger_halves)
        bits = tl.maximum(magnitude_bits(low(both, KIND)), magnitude_bits(high(both, KIND)))
    tl.atomic_max(scratch_ptr, bits, sem="relaxed")
    if tl.atomic_add(scratch_ptr + 1, 1, sem="release") == tl.num_programs(0) - 1:
        tl.atomic_xchg(scratch_ptr + 1, 0, sem="acquire")  # after what all others released
        tl.store(out_ptr, tl.atomic_xchg(scratch_ptr, 0, sem="relaxed").to(tl.float32, bitcast=True))


def amax(x: Tensor, *, scratch: Tensor | None = None) -> Tensor:
    """The largest magnitude of a contiguous tensor of any shape, [] float32; NaN if there is one; 0 of nothing.

    `scratch`: int32 [2], zeros, which it holds again afterwards; calls on one stream may share it.
    """
    if scratch is None:
        scratch = torch.zeros(2, dtype=torch.int32, device=x.device)
    out = torch.empty((), device=x.device)
    n, kind = x.numel(), 0
    if x.element_size() == 2 and n % 2 == 0 and x.data_ptr() % 4 == 0:
        n, kind = n // 2, 2 if x.dtype == torch.bfloat16 else 3
    programs = min(-(-n // BLOCK), PER_SM * _multiprocessors(x.device))
    _amax[(max(1, programs),)](x, scratch, out, n, kind, INTERPRETED, BLOCK, num_warps=WARPS, maxnreg=REGISTERS)
    return out


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
