"""RunWriter: the training thread hands over arrays, a daemon thread turns them into Parquet.

    training thread   copy + append, never any I/O        writer thread   every `flush_seconds`, or when
                      over `queue_bytes`: drop and count                  `flush_rows` or `flush_bytes`
                      wait: a segment

What waits is bounded, so a slow disk costs rows, never memory and never training time. What fails (a full
disk, a folder that vanished) stops the watch with one warning; training does not see an exception. A killed
process loses at most what was recorded since the last segment, by default the last 10 seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb

from narrowgauge.errors import UsageError
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.claim import claim
from narrowgauge.observe.store.compaction import merge_tier
from narrowgauge.observe.store.forking import GATE
from narrowgauge.observe.store.moments import Moments, finished
from narrowgauge.observe.store.schema import Kind
from narrowgauge.observe.store.segments import Array, Batch, SegmentWriter
from narrowgauge.observe.store.unlisted import UnlistedThread
from narrowgauge.observe.store.waiting import Rows, Waiting

_log = logging.getLogger("narrowgauge.store")

STATUSES = ("complete", "failed", "stopped")
NICE = 5  # the writer thread yields to those that train, and still gets a quarter of a core that is fully used


class RunWriter:
    """Writes one rank's part of a run folder without ever making training wait.

    Arguments: `path`, the run folder (made if missing); `meta`, the caller's facts for run.json; `rank`,
    whose rows these are; `resume`, continue a run that the folder already holds; `flush_rows`,
    `flush_bytes`, `flush_seconds`, what ends a segment, whichever comes first (with 60 seconds or more, readers on
    other hosts take the writer for silent); `queue_bytes`, how much may
    wait in memory before rows are dropped; `beside`, it is a part of another run, whose writer closes it and asks for
    its `problem`: nobody is warned. Errors: RunError if the folder cannot be written, or holds a run and `resume`
    was not given.

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
        beside: bool = False,
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self.problem = ""  # why the watch stopped, if it did
        self._pid = os.getpid()
        self._waiting = Waiting(self.path, flush_rows, flush_bytes, queue_bytes)
        self._changed = self._waiting.changed
        self._seconds = flush_seconds
        self._newest_scalars = 0
        self._latest = 0.0  # time of any row of scalars
        self._closing: str | None = None
        self._asked = self._done = 0  # flushes asked for and done
        self._manifest, next_index = claim(self.path, dict(meta or {}), rank, resume)
        try:
            with GATE.inside():
                self._segments = SegmentWriter(self.path, rank, int(self._manifest["attempt"]), next_index)
            self._thread = UnlistedThread(self._run)
        except Exception:
            if not resume:  # nobody writes this run
                (self.path / manifests.name(rank)).unlink(missing_ok=True)
            raise
        self._warn = _log.info if beside else _log.warning
        if not beside:
            atexit.register(self._at_exit)

    @property
    def lost(self) -> dict[Kind, int]:
        """Rows that were dropped, by kind."""
        return self._waiting.lost

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

    def add_event(self, step: int, kind: str, message: str, site: str | None = None, **data: Any) -> None:
        """Record something that happened: `kind` ("nan", "skipped", ...), a sentence, where, and data."""
        if os.getpid() != self._pid:
            return
        row = (int(step), kind, site, message, json.dumps(manifests.plain(data)), time.time())
        with self._changed:
            self._waiting.event(step, row)

    def update_meta(self, **facts: Any) -> None:
        """Add or replace facts in run.json's meta; the writer thread writes them within `flush_seconds`."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._manifest = {**self._manifest, "meta": {**self._manifest["meta"], **facts}}
            self._waiting.dirty = True

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until everything recorded so far is on disk; False if the watch stopped or time ran out."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            self._asked += 1
            ticket = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= ticket or not self._thread.is_alive(), timeout)
            return self._done >= ticket and not self.problem

    def close(self, status: str = "complete", timeout: float = 60.0) -> None:
        """Write what waits, then the final status: "complete", "failed" or "stopped". Twice is harmless.

        A run whose watch had to stop early stays "stopped", whatever status is asked for.
        """
        if status not in STATUSES:
            raise UsageError(f"status {status!r} is unknown; there is: {', '.join(STATUSES)}.")
        if os.getpid() != self._pid:
            return
        atexit.unregister(self._at_exit)
        with self._changed:
            if self._closing is not None:
                return
            self._closing, self._waiting.closed = status, True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._warn("narrowgauge: %s was not written to its end within %g s; the disk does not answer.",
                       self.path, timeout)  # fmt: skip

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("complete" if kind is None else "failed")

    def _at_exit(self) -> None:
        """A program that ends without closing: its status follows from whether an exception ended it."""
        self.close("failed" if getattr(sys, "last_value", None) is not None else "complete")

    # -- the writer thread

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux knows priorities of single threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        deadline = time.monotonic() + self._seconds
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing is not None or self._asked > self._done or self._waiting.full,
                    max(0.0, deadline - time.monotonic()),
                )
                deadline = time.monotonic() + self._seconds
                taken = self._waiting.take()
                ticket, closing = self._asked, self._closing
            try:
                self._write(taken, closing)
            except Exception as error:
                self._stop(error, taken)
            with self._changed:
                self._waiting.written()
                self._done = ticket
                self._changed.notify_all()
            if closing is not None:
                return

    def _write(self, taken: Rows, closing: str | None) -> None:
        if self.problem:
            self._waiting.give_up(taken)
        else:
            self._report_losses(taken)
            # Scalars first: if the disk fills, the loss curve is what must survive.
            with self._inside() as segments:
                if taken.scalars:
                    segments.scalars(taken.scalars)
                    taken.scalars = []
                if taken.events:
                    segments.events(taken.events)
                    taken.events = []
                self._merge()
            if taken.tensors:
                batches = finished(taken.tensors)  # outside: it takes as long as much of the writing
                with self._inside() as segments:
                    segments.tensors(batches)
                    taken.tensors = []
                    self._merge()
        with self._changed:
            dirty, self._waiting.dirty = self._waiting.dirty, False
            self._manifest["lost"] = dict(self.lost)
            if closing is not None:
                self._manifest |= {"status": "stopped" if self.problem else closing, "ended": manifests.now()}
            current = dict(self._manifest)
        if dirty or closing is not None:
            manifests.write(self.path, current)
        elif not self.problem:
            manifests.give_sign(self.path, self.rank)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[SegmentWriter]:
        """DuckDB may be open in this block, and is closed behind it: forks wait that long, and no longer."""
        with GATE.inside():
            try:
                yield self._segments
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # they hold DuckDB, as would a child forked from now on
                raise
            finally:
                with contextlib.suppress(duckdb.Error):  # what was to be written is on disk, or given up
                    self._segments.close()

    def _merge(self) -> None:
        """Keep the number of files small; a merge that fails costs nothing, so nobody need hear of it."""
        for kind, index in self._segments.written:
            try:
                merge_tier(self._segments.db, self.path, kind, self.rank, index)
            except (duckdb.Error, OSError) as error:
                _log.info("narrowgauge: segments of %s were not merged: %s", self.path, error)
        self._segments.written.clear()

    def _report_losses(self, taken: Rows) -> None:
        """Leave an event where rows were dropped since the last segment, so that a gap explains itself."""
        with self._changed:
            dropped, step = self._waiting.dropped(), self._waiting.last_step
        if dropped:
            message = f"{dropped} tensor rows were dropped: the disk was too slow"
            taken.events.append((step, "rows_lost", None, message, json.dumps({"rows": dropped}), time.time()))

    def _stop(self, error: Exception, taken: Rows) -> None:
        """Give up writing: one warning, and the status in run.json if that can still be written."""
        cause = " ".join(str(error).split()) or type(error).__name__
        with self._changed:
            already, self.problem = self.problem, self.problem or cause
            self._waiting.closed = True
            if not already:
                self._waiting.give_up(taken)
            self._manifest |= {"status": "stopped", "reason": self.problem, "ended": manifests.now()}
            current = {**self._manifest, "lost": dict(self.lost)}
        if already:  # the last attempt, at closing time, to say in run.json how it ended
            return
        self._warn(
            "narrowgauge: the watch of %s stopped near step %d: %s. Training goes on unrecorded, and what "
            "was written before stays readable. Make room or choose another folder before the next run.",
            self.path, self._waiting.last_step, cause,
        )  # fmt: skip
        with contextlib.suppress(OSError):  # a disk that takes nothing at all; the warning has said so
            manifests.write(self.path, current)
