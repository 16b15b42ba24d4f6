"""amax of a tensor in one read and one launch: programs stride over it, and one atomic maximum of bits joins them.

    amax = max |x|        as bits, so that a NaN wins over an Inf and an Inf over every number

What they join in has to be zero before. With a `scratch` that is, the program that is last to count itself moves the
result out and leaves zeros: then nothing has to be cleared, which for small tensors costs as much as the reading.

16-bit numbers are compared two at a time, as they lie in memory. As many programs are launched as run at once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Launch, launch
from narrowgauge.compute.kernels.fused.rules import INTERPRETED, magnitude_bits, widen
from narrowgauge.compute.kernels.fused.tile import ANY, high, in_pairs, larger_halves, low

BLOCK, WARPS = 8192, 8  # numbers or pairs of numbers per program and round
PER_SM, REGISTERS = 4, 64  # programs of that many warps that run at once on a multiprocessor


@triton.jit(do_not_specialize_on_alignment=["bits_ptr", "scratch_ptr"])
def _amax(
    x_ptr, bits_ptr, scratch_ptr, n, KIND: tl.constexpr, INTERPRET: tl.constexpr, LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
            if in_pairs(KIND, INTERPRET):
                largest = larger_halves(largest, both & 0x7FFF7FFF)
            else:
                found = tl.maximum(magnitude_bits(low(both, KIND)), magnitude_bits(high(both, KIND)))
                largest = tl.maximum(largest, found)
        first += tl.num_programs(0).to(tl.int64) * BLOCK
    if in_pairs(KIND, INTERPRET):
        both = tl.reduce(largest, 0, larger_halves)
        bits = tl.maximum(magnitude_bits(low(both, KIND)), magnitude_bits(high(both, KIND)))
    else:
        bits = tl.max(largest, 0)
    bits_ptr = bits_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if LAST:
        tl.atomic_max(scratch_ptr, bits, sem="relaxed")
        if tl.atomic_add(scratch_ptr + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(bits_ptr, tl.atomic_xchg(scratch_ptr, 0, sem="relaxed"))
            tl.atomic_xchg(scratch_ptr + 1, 0, sem="relaxed")
    else:
        tl.atomic_max(bits_ptr, bits, sem="relaxed")


def amax(x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The largest magnitude of a contiguous tensor of any shape, [] float32; NaN if there is one; 0 of nothing.

    Args:
        x: of 16 or 32 bits, on the current device.
        out: [] float32, where it goes; comes with `scratch`.
        scratch: int32 [2], zeros, which it holds again afterwards; calls on one stream may share it.
    """
    if out is None or scratch is None:
        out, scratch = torch.zeros((), dtype=torch.float32, device=x.device), None
    programs, n, constants = _how(x, scratch is not None)
    launch(_amax, programs, (x, out, scratch), (n,), constants, num_warps=WARPS, maxnreg=REGISTERS)
    return out


def prepared(x: Tensor) -> Launch:
    """What is launched with (x, out, scratch), as `amax` does it, for all tensors that lie in memory as x does."""
    programs, n, constants = _how(x, last=True)
    return Launch(_amax, programs, (n,), constants, num_warps=WARPS, maxnreg=REGISTERS)


def _how(x: Tensor, last: bool) -> tuple[int, int, tuple[int, bool, bool, int]]:
    """Programs, numbers or pairs of numbers, and constants of the kernel."""
    n, kind = x.numel(), 0
    if x.element_size() == 2 and n % 2 == 0 and x.data_ptr() % 4 == 0:
        n, kind = n // 2, 2 if x.dtype == torch.bfloat16 else 3
    programs = max(1, min(-(-n // BLOCK), PER_SM * _multiprocessors(x.device)))
    return programs, n, (kind, INTERPRETED, last, BLOCK)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
