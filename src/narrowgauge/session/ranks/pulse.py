"""Who of the ranks is still there, found out beside the training: for a gather that one of them will never join.

    every BEAT seconds     this rank counts up a key of its own in the store
    while a gather is open it reads the others'; a count that stands still for GONE seconds is a gone rank's

A rank that is slow (it evaluates, writes a checkpoint, compiles) goes on counting, in a thread, and is waited for by
nobody but the gather; one that was killed, stopped or cut off does not, nor does one that has given up merging and says
so. Where the store itself is gone, so is the rank that had it. Whoever finds a rank gone tells all others by a key, so
that one that was only stopped, and goes on, joins no gather that the rest have left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from narrowgauge.observe.store.unlisted import UnlistedThread

BEAT = 5.0  # seconds
GONE = 60.0  # seconds without a beat: longer than anything holds Python's lock


class Pulse:
    """One rank's part in it: a thread, from now on until `stop`.

    Args:
        store: a `torch.distributed.Store` that all ranks share, over a connection that nobody else waits on.
        rank, world: which of how many.
        since: when the oldest gather that is under way began (`time.monotonic`), None if none is.
        lost: called once, from the thread, with why a gather that is under way will not end.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        since: Callable[[], float | None],
        lost: Callable[[str], None],
        beat: float = BEAT,
        gone: float = GONE,
    ) -> None:
        self._store, self._rank, self._others = store, rank, [r for r in range(world) if r != rank]
        self._since, self._lost, self._beat, self._gone = since, lost, beat, gone
        self._count = 0
        self._seen: dict[int, tuple[bytes, float]] = {}  # what another rank's count was, and since when
        self._ending = threading.Event()
        self._tell()  # before this rank says that it will come by: then every rank's count is there to be read
        self._thread = UnlistedThread(self._run)

    def stop(self) -> None:
        """Beat no more: this rank joins no further gather."""
        self._ending.set()
        if not self._thread.is_this():
            self._thread.join(0.5)

    def _run(self) -> None:
        while not self._ending.wait(self._beat):
            try:
                self._tell()
                why = self._look()
            except Exception as error:
                why = f"the ranks' store does not answer ({type(error).__name__})"
            with suppress(Exception):
                if why and self._since() is not None:
                    self._lost(why)
                    give_up(self._store)
                    return

    def _tell(self) -> None:
        self._count += 1
        self._store.set(f"pulse/{self._rank}", str(self._count))

    def _look(self) -> str:
        """Why the gather that is under way will not end; "" if it may."""
        since, now = self._since(), time.monotonic()
        if since is None:
            self._seen.clear()
            return ""
        if given_up(self._store):
            return "another rank has given up merging"
        counts = self._store.multi_get([f"pulse/{rank}" for rank in self._others])
        for rank, count in zip(self._others, counts, strict=True):
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = count, now
        gone = [rank for rank, (_, at) in self._seen.items() if now - at > self._gone and now - since > self._gone]
        return f"rank {', '.join(map(str, gone))} gave no sign of life for {self._gone:g} s" if gone else ""


def give_up(store: Any) -> None:
    """Tell all ranks that this one joins no further gather, whatever was agreed."""
    with suppress(Exception):  # the store may be why
        store.set("pulse/left", "")


def given_up(store: Any) -> bool:
    """Whether any rank has told so."""
    return bool(store.check(["pulse/left"]))
