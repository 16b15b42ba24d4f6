"""How long this rank waits for others at its end: for each thing some seconds, and longer for a rank that lives.

    seconds    for each of: decisions, gathers, last words
    spare      once, for all of these together: while who is waited for may still come (a busy machine, one that was
               late before); and for ranks that have agreed to merge and still meet

A rank that is gone, has come to its end, or trains nothing is waited for no longer; what it left is looked at once
more. For a gather all are waited for together: one that ended well has done its part, and the rest may still come. One
that lives may train on for hours, or wait for this process to be gone: it has these seconds, and then a note says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from narrowgauge.errors import RunError
from narrowgauge.observe.store import ends
from narrowgauge.observe.store import manifest as manifests

POLL = 0.01
SELDOM = 0.1  # beyond the seconds that each has: files are read to know who lives


class Patience:
    """This rank's, at its end.

    Args:
        seconds, spare: see above.
        coming: whether a rank may still come.
        ended: whether one has ended well.
    """

    def __init__(
        self,
        seconds: float,
        spare: float,
        coming: Callable[[int], bool],
        ended: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.seconds, self.spare, self.coming, self._ended = seconds, spare, coming, ended

    def wait(self, done: Callable[[], bool], coming: Callable[[], bool]) -> bool:
        """Until it is `done`, or `coming` says that those who are waited for will not come; whether it is done."""
        deadline = time.monotonic() + self.seconds
        try:
            while not done():
                late = time.monotonic() - deadline
                if late >= self.spare:
                    return False
                if late >= 0 and not coming():
                    return done()
                time.sleep(POLL if late < 0 else SELDOM)
            return True
        finally:
            self.spent(time.monotonic() - deadline)

    def spent(self, seconds: float) -> None:
        """So many of the spare seconds are over."""
        self.spare -= min(max(seconds, 0.0), self.spare)

    def all_coming(self, ranks: Iterable[int]) -> bool:
        """Whether each of these ranks may still come."""
        return all(map(self.coming, ranks))

    def rest_coming(self, ranks: Iterable[int]) -> bool:
        """Whether each of these has ended well or may still come, and one of them may."""
        coming = {rank: self.coming(rank) for rank in ranks}  # asked first: who ends meanwhile has ended well below
        return any(coming.values()) and all(may or self._ended(rank) for rank, may in coming.items())


def may_come(folder: Path, rank: int) -> bool:
    """Whether the process that writes this rank's part of a run may still come to its end; True where nobody knows."""
    try:
        manifest = manifests.read(folder, rank)
        silent = manifests.is_alive(manifest) is None and manifests.silence(folder, rank) > ends.SILENT
    except (OSError, RunError):
        return True
    return manifests.status(manifest) == "running" and not silent


def has_part(folder: Path, rank: int) -> bool:
    """Whether this rank has a part of a run here."""
    return (folder / manifests.name(rank)).exists()


def has_ended(folder: Path, rank: int) -> bool:
    """Whether the process that writes this rank's part of a run has told that it ended well."""
    try:
        return manifests.read(folder, rank).get("status") == "complete"
    except (OSError, RunError):
        return False
