"""What the training thread has handed over and the writer thread has not yet taken: bounded, and counted if dropped.

Everything here happens under the lock `changed`, of which the writer thread is told when a segment is full.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from narrowgauge.observe.store.moments import Moments
from narrowgauge.observe.store.schema import Kind
from narrowgauge.observe.store.segments import Batch

_log = logging.getLogger("narrowgauge.store")

SMALL_ROWS = 1_000_000  # scalars and events that may wait: few and precious, they do not compete for bytes

Scalar = tuple[int, str, float, float]
Event = tuple[int, str, str | None, str, str, float]


@dataclass
class Rows:
    """What is written at once."""

    tensors: list[Batch | Moments] = field(default_factory=list)
    scalars: list[Scalar] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0


class Waiting:
    """The rows that wait.

    Args:
        path: of the run, for what is said.
        rows, nbytes: of tensors, that make a segment.
        room: bytes of tensors that may wait or be on their way to the disk.

    Attributes:
        segment: `rows` and `nbytes`.
        lost: rows that were not taken, by kind; `dirty` once they should be told, or something else has changed.
        closed: nothing more is taken.
        last_step: of the newest rows.
    """

    def __init__(self, path: Path, rows: int, nbytes: int, room: int) -> None:
        self.changed = threading.Condition()
        self.lost: dict[Kind, int] = {"tensors": 0, "scalars": 0, "events": 0}
        self.dirty = self.closed = False
        self.last_step = 0
        self.segment = rows, nbytes
        self._path, self._room = path, room
        self._rows = Rows()
        self._taken = 0  # bytes taken by the writer thread and not yet on disk
        self._dropping = False
        self._reported = 0

    @property
    def full(self) -> bool:
        """Whether a segment waits."""
        return self._rows.rows >= self.segment[0] or self._rows.nbytes >= self.segment[1]

    def tensors(self, batch: Batch | Moments) -> None:
        """Take the rows of a step's tensors."""
        rows, nbytes = len(batch.sites), batch.nbytes
        if not rows or not self._takes("tensors", rows):
            return
        if self.held + nbytes > self._room:
            self._lose("tensors", rows, batch.step)
            return
        self._rows.tensors.append(batch)
        self._rows.rows += rows
        self._rows.nbytes += nbytes
        self.last_step = batch.step
        if self.full:
            self.changed.notify_all()

    def scalars(self, step: int, rows: list[Scalar]) -> None:
        """Take scalars of a step."""
        if self._few("scalars", len(rows), step):
            self._rows.scalars += rows
            self.last_step = step

    def event(self, step: int, row: Event) -> None:
        """Take an event."""
        if self._few("events", 1, step):
            self._rows.events.append(row)

    @property
    def held(self) -> int:
        """Bytes of tensors that wait or are on their way."""
        return self._rows.nbytes + self._taken

    def take(self) -> Rows:
        """All that waits; its bytes count until `written`."""
        taken, self._rows = self._rows, Rows()
        self._taken = taken.nbytes
        return taken

    def written(self) -> None:
        """What was taken is on disk, or given up."""
        self._taken = 0

    def dropped(self) -> int:
        """Rows of tensors that were lost since this was asked last."""
        found = self.lost["tensors"] - self._reported
        self._reported = self.lost["tensors"]
        return found

    def give_up(self, taken: Rows) -> None:
        """Count what was taken as lost."""
        self.lost["tensors"] += sum(len(batch.sites) for batch in taken.tensors)
        self.lost["scalars"] += len(taken.scalars)
        self.lost["events"] += len(taken.events)

    def _takes(self, kind: Kind, rows: int) -> bool:
        """Whether rows are still recorded; once all is closed they are counted as lost."""
        if self.closed:
            self.lost[kind] += rows
        return not self.closed

    def _few(self, kind: Kind, rows: int, step: int) -> bool:
        """Whether scalars or events are taken."""
        if not self._takes(kind, rows):
            return False
        if len(self._rows.scalars) + len(self._rows.events) + rows > SMALL_ROWS:
            self._lose(kind, rows, step)
            return False
        return True

    def _lose(self, kind: Kind, rows: int, step: int) -> None:
        """Count rows for which there is no room, and say so the first time."""
        self.lost[kind] += rows
        self.dirty = True
        if not self._dropping:
            self._dropping = True
            _log.warning(
                "narrowgauge: the disk of %s is too slow: more than %d MiB wait to be written, so rows are "
                "dropped, first at step %d (run.json counts them). Training goes on; record fewer steps, or "
                "write to a faster disk.",
                self._path, self._room >> 20, step,
            )  # fmt: skip
