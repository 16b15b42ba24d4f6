"""The ranks of a program, and the store over which they tell each other things."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from narrowgauge.session.ranks.answering import bound, lines

_available = dist.is_available()
PATIENCE = 5.0  # seconds for a store to take another connection
ANSWERS = 10.0  # seconds for it to answer what is asked


class Met(NamedTuple):
    """What ranks know each other by."""

    store: Any
    rank: int
    world: int


def programs_own() -> Met | None:
    """The ranks of the program's default process group, if there are several."""
    # Asked in every step, for a program may make its group late: so it is looked where torch's own functions look.
    group = dist.distributed_c10d._world.default_pg if _available else None
    if group is None or group.size() < 2:
        return None
    return Met(dist.distributed_c10d._get_default_store(), dist.get_rank(), group.size())


class Meeting:
    """The ranks that this process is one of, once there are several.

    Args:
        meet: the program's ranks, None as long as it has none.

    Attributes:
        rank: which one this is.
        world: how many there are; 0 before they met.
    """

    def __init__(self, meet: Callable[[], Met | None] | None = None) -> None:
        self._meet = meet or programs_own
        self._shared: Any = None  # held: the process that started a store ends it with its last reference
        self._turn = 0  # which watch of these ranks it is, from 1
        self.rank = self.world = 0

    def find(self) -> bool:
        """Ask once more whether there are several; whether there are."""
        met = self._meet()
        if met is None or met.world < 2:
            return False
        self._shared, self.rank, self.world = met
        return True

    def keep(self) -> None:
        """Hold the program's store to the end of the process: somebody may wait for it in a thread of its own.

        A thread that torch wakes with an error while Python takes itself apart aborts the process.
        """
        if self._shared is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._shared))

    def leave(self) -> None:
        """Let go of the program's store: it is about to take its group down, and may make one at the same address."""
        self._shared = None

    def store(self, name: str) -> Any:
        """A part of the program's own store, over a connection that nobody else waits on; of this watch alone."""
        store = self._shared
        store = _cloned(store)
        # A program may be watched more than once, and would find the keys of the watch before.
        start = _start()
        self._turn = self._turn or store.add(f"narrowgauge/watches{start}/{self.rank}", 1)
        return dist.distributed_c10d.PrefixStore(f"narrowgauge{start}/{self._turn}/{name}", store)


def _cloned(store: Any) -> Any:
    """The store over a connection of its own; the store itself if it has none.

    Raises:
        RuntimeError: it does not answer. torch goes on trying for minutes where the process that had it is gone.
    """
    found: list[Any] = []

    def clone() -> None:
        before = lines(store)
        try:
            own = store.clone()
        except Exception:  # it has none
            own = store
        if len(new := lines(store) - before) == 1:  # or somebody else has connected meanwhile
            bound(new.pop(), ANSWERS)
        found.append(own)

    trying = threading.Thread(target=clone, daemon=True, name="narrowgauge-store")
    trying.start()
    trying.join(PATIENCE)
    if not found:
        raise RuntimeError(f"the ranks' store did not answer in {PATIENCE:g} s: the rank that had it is gone")
    return found[0]


def _start() -> str:
    """Which start of the program it is, where all ranks are told the same; else "".

    torch's elastic launcher keeps the store, with all keys, for those that it starts again. A rank that died before it
    counted its watch would count otherwise than the rest from then on. Launchers of several machines count their own
    failures only, so there the count of watches is all that there is.
    """
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return f"/start-{again}" if again.isdigit() and os.environ.get("GROUP_WORLD_SIZE") == "1" else ""
