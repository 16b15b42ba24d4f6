"""The threads that torch computes with on the CPU, as the compiled walk is told of them (see host_team).

They are OpenMP's, of the library that torch's own operations call: found as torch found it, among what every library of
the process sees. Where torch was built without OpenMP, or this is not found, nothing is shared out. Nor is it in a
fork: OpenMP's threads are the parent's, and a child that calls them waits for ever.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

import numpy as np
import torch

# In the order of host_team.TEAM.
FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")


@cache
def address() -> int:
    """Where the walk reads of the team whom to ask; the same for as long as the process lives."""
    return int(_team().ctypes.data)


@cache
def _team() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    team = np.array(_found(), np.int64)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: team.fill(0))
    return team


def _found() -> list[int]:
    """Addresses of the functions; zeros where one is missing."""
    nothing = [0] * len(FUNCTIONS)
    if not torch.backends.openmp.is_available():
        return nothing
    try:
        process = ctypes.CDLL(None)
        return [ctypes.cast(getattr(process, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS]
    except (AttributeError, OSError, TypeError):  # no such function, or no such door in this system
        return nothing
