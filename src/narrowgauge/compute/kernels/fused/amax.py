"""amax of a tensor in one read and one launch: programs stride over it, and one atomic maximum of bits joins them.

    amax = max |x|        as bits, so that a NaN wins over an Inf and an Inf over every number

16-bit numbers are compared two at a time, as they lie in memory. As many programs are launched as run at once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import launch
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, magnitude_bits, widen
from narrowgauge.compute.kernels.fused.tile import ANY, high, larger_halves, low

BLOCK, WARPS = 8192, 8  # numbers or pairs of numbers per program and round
PER_SM, REGISTERS = 4, 64  # programs of that many warps that run at once on a multiprocessor


@triton.jit
def _amax(x_ptr, bits_ptr, n, KIND: tl.constexpr, INTERPRET: tl.constexpr, BLOCK: tl.constexpr):
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
    tl.atomic_max(bits_ptr.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a contiguous tensor of any shape, [] float32; NaN if there is one; 0 of nothing."""
    out = torch.zeros((), device=x.device)
    n, kind = x.numel(), 0
    if x.element_size() == 2 and n % 2 == 0 and x.data_ptr() % 4 == 0:
        n, kind = n // 2, 2 if x.dtype == torch.bfloat16 else 3
    programs = max(1, min(-(-n // BLOCK), PER_SM * _multiprocessors(x.device)))
    launch(_amax, programs, (x, out), (n,), (kind, INTERPRETED, BLOCK), num_warps=WARPS, maxnreg=REGISTERS)
    return out


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
