"""TensorBoard: an event file that its own writer makes; no TensorFlow, no torch.

run/loss ...                     scalars of every step
tensors/sqnr_db/input/min ...    what the sites of a role are like, in recorded steps
worst, events                    text
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from narrowgauge.observe.export.exporter import Event, Exporter, Look, Point

FOLDER = "tensorboard"


class TensorBoard(Exporter):
    """Settings: `dir`, where its files go; without it, `tensorboard` in the run's folder."""

    def __init__(self, folder: Path, table: Mapping[str, Any]) -> None:
        super().__init__(folder, table)
        self._folder = Path(table.get("dir") or folder / FOLDER)
        self._worst: dict[str, str] = {}

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        """Open the event file."""
        self._writer = EventFileWriter(str(self._folder))
        self._text(0, None, "run", _rows("fact", {"run": name, **facts}))

    def scalars(self, points: Sequence[Point]) -> None:
        """One record per step."""
        for point in points:
            self._numbers(point.step, point.wall_time, {f"run/{name}": value for name, value in point.values.items()})

    def look(self, look: Look) -> None:
        """One record, and a table of the worst sites where it changed."""
        self._numbers(look.step, look.wall_time, {f"tensors/{name}": value for name, value in look.numbers().items()})
        worst = {name: site for name, site in look.worst().items() if site}
        if worst != self._worst:
            self._worst = worst
            self._text(look.step, look.wall_time, "worst", _rows("metric/role", worst))

    def event(self, event: Event) -> None:
        """A text under the event's kind."""
        self._text(event.step, event.wall_time, f"events/{event.kind}", event.line())

    def flush(self) -> None:
        """Have it on disk, where TensorBoard looks."""
        self._writer.flush()

    def close(self, status: str) -> None:
        """End the file."""
        self._writer.close()

    def _numbers(self, step: int, when: float, values: Mapping[str, float]) -> None:
        made = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(Record(step=step, wall_time=when, summary=Summary(value=made)))

    def _text(self, step: int, when: float | None, tag: str, text: str) -> None:
        self._writer.add_event(Record(step=step, wall_time=when or time.time(), summary=text_pb(tag, text)))


def _rows(head: str, cells: Mapping[str, str]) -> str:
    return "\n".join([f"| {head} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells.items())])
