"""The thread that brings to disk what waits, and what is asked of it: facts for run.json, a flush, the end.

    wait         until a segment is full, somebody asks, or `seconds` have passed           under the lock of what waits
    write        scalars and events, then tensors, and merge small segments                 with DuckDB open
    run.json     what has changed since; else a sign of life

Its state changes under the lock of what waits (waiting.py). An error stops the watch, with one warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb

from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.cause import cause
from narrowgauge.observe.store.compaction import merge_tier
from narrowgauge.observe.store.database import Shared
from narrowgauge.observe.store.forking import GATE
from narrowgauge.observe.store.moments import finished
from narrowgauge.observe.store.schema import Kind
from narrowgauge.observe.store.segments import SegmentWriter
from narrowgauge.observe.store.unlisted import UnlistedThread, unlist
from narrowgauge.observe.store.waiting import Rows, Waiting

_log = logging.getLogger("narrowgauge.store")

NICE = 5  # it yields to those that train, and still gets a quarter of a core that is fully used


class WriterThread:
    """Writes one rank's part of a run, from now on until `close`.

    Args:
        path: of the run.
        waiting: what is handed over.
        manifest: of this rank, as it is on disk; `next_index`, of its next segments.
        seconds: after which what waits is written, however little it is.
        warn: is told why the watch stopped.
        shared: the DuckDB to write with.
        tries: whether DuckDB can be opened is known at once, and not with the first segment.

    Attributes:
        problem: why it stopped, if it did.
    """

    def __init__(
        self,
        path: Path,
        waiting: Waiting,
        manifest: manifests.Manifest,
        next_index: dict[Kind, int],
        seconds: float,
        warn: Callable[..., None],
        gather: Callable[[], None] = lambda: None,
        *,
        shared: Shared,
        tries: bool = True,
    ) -> None:
        self.problem = ""
        self._path, self._rank, self._seconds, self._warn = path, int(manifest["rank"]), seconds, warn
        self._waiting, self._changed, self._gather = waiting, waiting.changed, gather
        self._manifest = manifest
        self._closing: str | None = None
        self._asked = self._done = 0  # flushes asked for and done
        with GATE.inside():
            self._segments = SegmentWriter(path, self._rank, int(manifest["attempt"]), next_index, shared)
            if tries:
                self._segments.try_open()
        self._thread = UnlistedThread(self._run)

    # Asked by other threads.

    def update_meta(self, facts: dict[str, Any]) -> None:
        """Add or replace facts in run.json's meta."""
        with self._changed:
            self._manifest = {**self._manifest, "meta": {**self._manifest["meta"], **facts}}
            self._waiting.dirty = True

    def flush(self, timeout: float) -> bool:
        """Wait until everything handed over so far is on disk; False if the watch stopped or time ran out."""
        with self._changed:
            self._asked += 1
            ticket = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= ticket or not self._thread.is_alive(), timeout)
            return self._done >= ticket and not self.problem

    def end(self, status: str) -> None:
        """Write what waits, then the final status; nothing more is taken. The first status counts."""
        with self._changed:
            self._closing, self._waiting.closed = self._closing or status, True
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Wait for the end that was asked for."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._warn("narrowgauge: %s was not written to its end within %g s; the disk does not answer.",
                       self._path, timeout)  # fmt: skip

    # The thread's own.

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
            self._gather()
            with self._changed:
                deadline = time.monotonic() + self._seconds
                taken = self._waiting.take()
                ticket, closing = self._asked, self._closing
            try:
                self._write(taken, closing)
            except Exception as error:
                self._stop(error, taken)
            unlist()
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
            self._manifest["lost"] = dict(self._waiting.lost)
            if closing is not None:
                self._manifest |= {"status": "stopped" if self.problem else closing, "ended": manifests.now()}
            current = dict(self._manifest)
        if dirty or closing is not None:
            (manifests.write_end if self.problem else manifests.write)(self._path, current)
        elif not self.problem:
            manifests.give_sign(self._path, self._rank)

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
                merge_tier(self._segments.db, self._path, kind, self._rank, index)
            except (duckdb.Error, OSError) as error:
                _log.info("narrowgauge: segments of %s were not merged: %s", self._path, error)
        self._segments.written.clear()

    def _report_losses(self, taken: Rows) -> None:
        """Leave an event where rows were dropped since the last segment, so that a gap explains itself."""
        with self._changed:
            dropped, step = self._waiting.dropped(), self._waiting.last_step
        if dropped:
            message = f"{dropped} tensor rows were dropped: the disk was too slow"
            taken.events.append((step, "rows_lost", None, message, json.dumps({"rows": dropped}), time.time()))

    def _stop(self, error: Exception, taken: Rows) -> None:
        """Give up writing: one warning, and the status in run.json, for which room was kept."""
        why = cause(error)
        with self._changed:
            already, self.problem = self.problem, self.problem or why
            self._waiting.closed = True
            if not already:
                self._waiting.give_up(taken)
            self._manifest |= {"status": "stopped", "reason": self.problem, "ended": manifests.now()}
            current = {**self._manifest, "lost": dict(self._waiting.lost)}
        if already:  # the last attempt, at closing time, to say in run.json how it ended
            return
        self._warn(
            "narrowgauge: the watch of %s stopped near step %d: %s. Training goes on unrecorded, and what "
            "was written before stays readable. Make room or choose another folder before the next run.",
            self._path, self._waiting.last_step, why,
        )  # fmt: skip
        with contextlib.suppress(OSError, ValueError):  # it is gone, or takes nothing at all; the warning has said so
            manifests.write_end(self._path, current)
