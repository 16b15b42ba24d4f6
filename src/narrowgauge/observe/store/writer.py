"""RunWriter: the training thread hands over arrays, a daemon thread (writer_thread.py) turns them into Parquet.

    training thread   copy + append, never any I/O        writer thread   every `flush_seconds`, or when
                      over `queue_bytes`: drop and count                  `flush_rows` or `flush_bytes`
                      wait: a segment

What waits is bounded, so a slow disk costs rows, never memory and never training time. What fails (a full
disk, a folder that vanished) stops the watch with one warning; training does not see an exception. A killed
process loses at most what was recorded since the last segment, by default the last 10 seconds.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from narrowgauge.errors import UsageError, there_are
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.claim import claim
from narrowgauge.observe.store.database import Shared
from narrowgauge.observe.store.moments import Moments
from narrowgauge.observe.store.schema import Kind
from narrowgauge.observe.store.segments import Array, Batch
from narrowgauge.observe.store.waiting import Waiting
from narrowgauge.observe.store.writer_thread import WriterThread

_log = logging.getLogger("narrowgauge.store")

STATUSES = ("complete", "failed", "stopped")


class RunWriter:
    """Writes one rank's part of a run folder without ever making training wait.

    Arguments: `path`, the run folder (made if missing); `meta`, the caller's facts for run.json; `rank`, whose rows
    these are; `resume`, continue a run that the folder already holds; `flush_rows`, `flush_bytes`, `flush_seconds`,
    what ends a segment, whichever comes first (with 60 seconds or more, readers on other hosts take the writer for
    silent); `queue_bytes`, how much may wait in memory before rows are dropped; `beside`, the writer of the run that
    this one is a part of, who closes it and asks for its `problem`: nobody is warned, and what both write at the same
    time goes through one DuckDB. Errors: RunError if the folder cannot be written, or holds a run and `resume` was not
    given.

    >>> import numpy, tempfile
    >>> with RunWriter(tempfile.mkdtemp(), {"command": "train.py"}) as writer:
    ...     writer.add_tensors(0, ["mlp:input", "mlp:weight"], {"amax": numpy.array([3.5, 0.25])})
    ...     writer.add_scalars(0, loss=2.5)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: dict[str, Any] | None = None,
        *,
        rank: int = 0,
        resume: bool = False,
        flush_rows: int = 262_144,
        flush_bytes: int = 64 << 20,
        flush_seconds: float = 10.0,
        queue_bytes: int = 256 << 20,
        beside: RunWriter | None = None,
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self._pid = os.getpid()
        self._waiting = Waiting(self.path, flush_rows, flush_bytes, queue_bytes)
        self._changed = self._waiting.changed
        self._newest_scalars = 0
        self._latest = 0.0  # time of any row of scalars
        self.gather: Callable[[], None] = _nothing  # called before each segment: who holds rows back adds them
        manifest, next_index = claim(self.path, dict(meta or {}), rank, resume)
        warn = _log.warning if beside is None else _log.info
        self._shared: Shared = Shared() if beside is None else beside._shared
        try:
            self._thread = WriterThread(
                *(self.path, self._waiting, manifest, next_index, flush_seconds, warn, lambda: self.gather()),
                shared=self._shared,
                tries=beside is None,  # else it was tried for the other one
            )
        except Exception:
            if not resume:  # nobody writes this run
                (self.path / manifests.name(rank)).unlink(missing_ok=True)
            raise
        if beside is None:
            atexit.register(self._at_exit)

    @property
    def lost(self) -> dict[Kind, int]:
        """Rows that were dropped, by kind."""
        return self._waiting.lost

    @property
    def problem(self) -> str:
        """Why the watch stopped, if it did."""
        return self._thread.problem

    def add_tensors(self, step: int, sites: Sequence[str], columns: dict[str, Any]) -> None:
        """Record one row per site: `columns[name]` is a [S] array (NaN: no value) or [S, bins] (a histogram).

        The arrays are copied. Different calls may carry different sites and columns; what a row lacks is
        null. Errors: ShapeError if a column does not have one entry per site.
        """
        if os.getpid() == self._pid:  # a forked data-loader worker has no writer thread
            batch = Batch.of(step, sites, columns)
            with self._changed:
                self._waiting.tensors(batch)

    def add_moments(
        self, step: int, sites: Sequence[str], table: Array, names: Sequence[str], further: Mapping[str, Array]
    ) -> None:
        """Record one row per site: the metrics `names` of its packed moments, `table` [S, width], made later.

        `further` are columns as in `add_tensors`. Nothing is copied.
        """
        if os.getpid() == self._pid:
            moments = Moments(int(step), tuple(sites), table, tuple(names), further)
            with self._changed:
                self._waiting.tensors(moments)

    def add_scalars(self, step: int, **values: float) -> None:
        """Record numbers of the whole step by name; None is skipped, NaN is kept as null.

        What a step has already is superseded: readers take the latest, whatever the machine's clock says.
        """
        if os.getpid() != self._pid:
            return
        now = time.time()
        with self._changed:
            if step <= self._newest_scalars:  # the clock may have been set back since its row
                now = max(now, math.nextafter(self._latest, math.inf))
            self._newest_scalars, self._latest = max(step, self._newest_scalars), max(now, self._latest)
            rows = [(int(step), name, float(value), now) for name, value in values.items() if value is not None]
            self._waiting.scalars(step, rows)

    @property
    def newest_scalars(self) -> int:
        """The last step that has any; 0 before the first."""
        return self._newest_scalars

    def add_event(self, step: int, kind: str, message: str, site: str | None = None, **data: Any) -> None:
        """Record something that happened: `kind` ("nan", "skipped", ...), a sentence, where, and data."""
        if os.getpid() != self._pid:
            return
        row = (int(step), kind, site, message, json.dumps(manifests.plain(data)), time.time())
        with self._changed:
            self._waiting.event(step, row)

    def update_meta(self, **facts: Any) -> None:
        """Add or replace facts in run.json's meta; the writer thread writes them within `flush_seconds`."""
        if os.getpid() == self._pid:
            self._thread.update_meta(facts)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until everything recorded so far is on disk; False if the watch stopped or time ran out."""
        return os.getpid() == self._pid and self._thread.flush(timeout)

    def close(self, status: str = "complete", timeout: float = 60.0) -> None:
        """Write what waits, then the final status: "complete", "failed" or "stopped". Twice is harmless.

        A run whose watch had to stop early stays "stopped", whatever status is asked for.
        """
        if self.end(status):
            self._thread.close(timeout)

    def end(self, status: str = "complete") -> bool:
        """Ask for what `close` does, which waits for it; False in another process than the one that began the run."""
        if status not in STATUSES:
            raise UsageError(f"status {status!r} is unknown; {there_are(STATUSES)}.")
        if os.getpid() != self._pid:
            return False
        atexit.unregister(self._at_exit)
        self.gather()
        self._thread.end(status)
        return True

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("complete" if kind is None else "failed")

    def _at_exit(self) -> None:
        """A program that ends without closing: its status follows from whether an exception ended it."""
        self.close("failed" if getattr(sys, "last_value", None) is not None else "complete")


def _nothing() -> None:
    """Nobody holds anything back."""
