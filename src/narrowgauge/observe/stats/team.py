"""The threads that torch computes with on the CPU, as the compiled walk is told of them (see host_team).

They are OpenMP's, of the library that torch's own operations call: found as torch found it, among what every library of
the process sees. Where torch was built without OpenMP, or this is not found, nothing is shared out. Nor is it in a
fork: OpenMP's threads are the parent's, and a child that calls them waits for ever.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch

# In the order of host_team.TEAM.
FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")
_TEAM = np.zeros(len(FUNCTIONS), np.int64)
_AT = int(_TEAM.ctypes.data)  # to ask for it takes as long as the walk over a small tensor
_FORKS: list[int] = []  # this process, if it is a fork, and those between it and the one that loaded this


def address() -> int:
    """Where the walk reads of the team whom to ask; the same for as long as the process lives."""
    settle()
    _find()
    return _AT


def settle() -> None:
    """Have OpenMP know how many threads torch computes with on this one: torch tells it when it is first asked."""
    torch.get_num_threads()


@cache
def _find() -> None:
    _TEAM[:] = _found()


def _found() -> list[int]:
    """Addresses of the functions; zeros where one is missing."""
    nothing = [0] * len(FUNCTIONS)
    if not torch.backends.openmp.is_available() or _FORKS or is_fork():
        return nothing
    try:
        process = ctypes.CDLL(None)
        return [ctypes.cast(getattr(process, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS]
    except (AttributeError, OSError, TypeError):  # no such function, or no such door in this system
        return nothing


def is_fork() -> bool:
    """Whether the parent, if it is there, runs what it and this process were both started with.

    What the kernel gave a program as it started is at addresses drawn at random, and a fork has its parent's.
    """
    with suppress(OSError):
        return Path("/proc/self/auxv").read_bytes() == Path(f"/proc/{os.getppid()}/auxv").read_bytes()
    return False


def _after_fork() -> None:
    _FORKS.append(os.getpid())
    _TEAM.fill(0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
