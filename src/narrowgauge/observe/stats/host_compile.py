"""The compiled walks, each called once with four numbers: loaded from numba's cache, or compiled into it.

    python -P host_compile.py       compiles them, in a process of its own that never loads torch

It ends when its input does, so with whoever started it. Of several that compile at once, for one cache, the first
does and the others wait for it; it gives way to a program that trains.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

PACKAGE = "narrowgauge.observe.stats"
ENTRIES = ("operand", "result", "copied", "moved", "digest")
POLITE = 10  # of 19
IDLE_SECONDS = 60.0  # for so long only what nobody else wants; where that is nothing, it would never be done
UNFINISHED = ".narrowgauge-unfinished"  # beside what is compiled: a byte for each time that somebody began


class NotCachedError(Exception):
    """Something would have to be compiled."""


def call_all(walk: ModuleType) -> None:
    """Call every entry of `host_kernel` with arguments of the types that it will get."""
    x, codes, scale = np.ones((2, 2), np.float32), np.full((2, 2), 0x38, np.uint8), np.ones(1, np.float32)
    facts, limits = (3, 7, 0, 0x7F, 0x7F, 0, 0, 8, 0), np.array((448, 449, 448, 0), np.float32)
    counted = len(walk.COUNTED) + len(walk.SAMPLED) + len(walk.SCALES)
    places, starts, vector = np.arange(counted), (100, 500, 500, 700, 700, 800, 100, 500), np.zeros(900)
    asked = (0, 2, codes.ctypes.data, scale.ctypes.data, 0, 1, 0, 1, 2, 2, 2, 2, 0, *facts, *places, *starts)
    at = x.ctypes.data
    walk.operand(at, 0, np.array(asked), limits, vector, np.zeros((2, 2)))
    walk.result(at, 0, 2, 2, 2, at, at, 4, places, places, vector)
    runs = np.array((at,)), np.array((at,)), np.array((4,)), 1, 0
    walk.copied(*runs, np.array((4,)), 0)
    walk.moved(*runs)
    walk.digest(at, 12)


@contextlib.contextmanager
def cached_only(walk: ModuleType) -> Iterator[None]:
    """NotCachedError instead of compiling."""

    def refuse(*args: Any) -> NoReturn:
        raise NotCachedError

    compilers = [
        getattr(entry, "_compiler", None) for entry in (getattr(walk, name) for name in ENTRIES)
    ]  # numba has no other door to what it knows
    for compiler in compilers:
        if compiler is not None:
            compiler.compile = refuse
    try:
        yield
    finally:
        for compiler in compilers:
            if compiler is not None:
                del compiler.compile


@contextlib.contextmanager
def alone(walk: ModuleType) -> Iterator[None]:
    """Nobody else compiles into the same folder; where folders cannot be locked, somebody may, to no harm."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(
            ImportError, OSError, AttributeError
        ):  # no fcntl; no such folder yet; a plain function
            import fcntl

            folder = Path(walk.operand.stats.cache_path)
            folder.mkdir(parents=True, exist_ok=True)
            number = os.open(folder, os.O_RDONLY)
            held.callback(os.close, number)
            fcntl.flock(number, fcntl.LOCK_EX)
        yield


def give_way() -> None:
    """Let others go first.

    Threads of a program that meet at a barrier wait for the one whose core is taken, even by a process that is nice: on
    two cores steps of 3 ms took 280. A core that only an idle process is on counts as free.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(POLITE)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def only_nice_after(seconds: float) -> None:
    """Have this process take its share from then on, though a small one."""
    with contextlib.suppress(AttributeError):
        usual = partial(os.sched_setscheduler, os.getpid(), os.SCHED_OTHER, os.sched_param(0))
        later = threading.Timer(seconds, usual)
        later.daemon = True
        later.start()


@contextlib.contextmanager
def patiently(folder: Path) -> Iterator[float]:
    """For how many seconds to take only what nobody wants; half as many each time, until somebody has finished.

    Compiling ends with the program. Of short ones on a busy machine none would ever come to its end.
    """
    tries, before = folder / UNFINISHED, 0
    with contextlib.suppress(OSError), tries.open("ab") as held:
        before = held.tell()
        held.write(b".")
    yield math.ldexp(IDLE_SECONDS, -before)
    with contextlib.suppress(OSError):
        tries.unlink()


def main() -> None:
    """Compile, unless it is done already."""
    give_way()
    threading.Thread(target=_end_with_input, daemon=True).start()
    # Of the very files that it lies beside, wherever Python would look, and without what packages load: torch, too.
    names = PACKAGE.split(".")
    for depth in range(1, len(names) + 1):
        bare = ModuleType(".".join(names[:depth]))
        bare.__path__ = [str(Path(__file__).parents[len(names) - depth])]
        sys.modules[bare.__name__] = bare
    walk = importlib.import_module(f"{PACKAGE}.host_kernel")
    with alone(walk), patiently(Path(walk.operand.stats.cache_path)) as seconds:
        only_nice_after(seconds)
        call_all(walk)


def _end_with_input() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
