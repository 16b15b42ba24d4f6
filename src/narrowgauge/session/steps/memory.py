"""Peak memory of a program, with what the probes held left out."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

NEAR = 1 << 20  # bytes; the kernel counts pages for each of its cores, and adds up late


class PeakMemory:
    """The most memory the program held, probes left out: device memory on a GPU, resident memory elsewhere."""

    def __init__(self) -> None:
        self._peak = 0
        self._short: bool | None = None  # whether the short way to the mark says the same; None before it was tried

    def sample(self, now: int = 0) -> None:
        """Take the peak since the last `forget` into account, and what is held `now`: the mark may lag behind it."""
        self._peak = max(self._peak, self._highest(), now)

    def forget(self) -> None:
        """Start anew: what was held until now was a probe's."""
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            return
        # Linux resets a process's high-water mark on request; elsewhere the probes stay in the figure.
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def bytes(self) -> int:
        """The peak in bytes."""
        return self._peak or self._highest()

    def now(self) -> int:
        """What the program holds at this moment, in bytes: of the device, or resident."""
        if torch.cuda.is_initialized():
            return _allocated("current")
        try:
            return int(_about_us("statm").split()[1]) * resource.getpagesize()
        except (OSError, IndexError, ValueError):
            return self._highest()

    def _highest(self) -> int:
        if torch.cuda.is_initialized():
            return _allocated("peak")
        if self._short:
            return _used()
        try:
            mark = int(_about_us("status").split(b"VmHWM:")[1].split(None, 1)[0]) * 1024
        except (OSError, IndexError, ValueError):
            return _used()
        if self._short is None:
            self._short = abs(mark - _used()) <= NEAR
        return mark


def _allocated(what: str) -> int:
    """`current` or `peak` bytes of the current device; torch's own functions sort all of its numbers to tell one."""
    found = torch.cuda.memory_stats_as_nested_dict()
    return int(found["allocated_bytes"]["all"][what]) if found else 0


def _used() -> int:
    """The process's mark, in a hundredth of the time that Linux takes to say all else.

    Of what ran in the process before it became this program, too. It is reset with the other.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _about_us(name: str) -> bytes:
    """What Linux says of this process, in half the time that a text file takes."""
    number = os.open(f"/proc/self/{name}", os.O_RDONLY)
    try:
        return os.read(number, 1 << 14)
    finally:
        os.close(number)
