"""How much device memory a step needs, whatever else lies there.

    peak = most bytes allocated during the step - bytes allocated before its model was built

What others hold does not change while they rest, so it cancels. Counted are the bytes that tensors hold, not the larger
blocks that the allocator reserves. A CPU has no such counter: None.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from narrowgauge.bench.timing import wait

SPARE = 0.08  # of a device's memory: what is lost between blocks, and what libraries take for themselves


class Need(NamedTuple):
    """Bytes of one model that trains: between two steps, and at the peak of one."""

    resting: int
    peak: int

    def times(self, factor: float) -> Need:
        """As much of each."""
        return Need(int(self.resting * factor), int(self.peak * factor))


def side_by_side(needs: Sequence[Need], total: int) -> bool:
    """Whether each can take its step while all others rest, on a device of `total` bytes.

    >>> side_by_side([Need(10, 60), Need(20, 40)], total=100), side_by_side([Need(10, 60), Need(40, 50)], total=100)
    (True, False)
    """
    resting = sum(need.resting for need in needs)
    return all(resting - need.resting + need.peak <= (1 - SPARE) * total for need in needs)


def allocated(device: torch.device) -> int:
    """Bytes of all live tensors on the device, 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_bytes(step: Callable[[], object], device: torch.device, before: int, steps: int = 2) -> int | None:
    """Run some steps and return their peak above `before` bytes."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        step()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def forget(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
