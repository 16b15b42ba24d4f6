"""Follower: one exporter in a thread of its own, fed from the run's folder until the program has ended.

    run.json is there -> begin -> what is new, every POLL seconds -> the program ended -> what is left -> close

Each follower has its own place in the run. So a tracker that hangs holds up nobody but itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from narrowgauge.errors import in_one_line
from narrowgauge.observe.export.exporter import Event, Exporter
from narrowgauge.observe.export.tail import Tail
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store import open_run

POLL = 1.0  # seconds
AT_ONCE = 1000  # steps handed over in one call


class Follower(threading.Thread):
    """Feeds the exporter that `make` gives from the run in `folder`, all in this thread.

    `problem` is why it ended early, if it did; `step` the last step that it has taken over.
    """

    def __init__(self, name: str, make: Callable[[], Exporter], folder: Path, sites: list[str]) -> None:
        super().__init__(name=f"narrowgauge-export-{name}", daemon=True)
        self.problem = ""
        self.step = 0
        self.notes: list[str] = []
        self.unmet: list[str] = []
        self._make, self._folder, self._sites = make, folder, sites
        self._ended = threading.Event()

    def end(self) -> None:
        """The program has ended: take over what there is, and close."""
        self._ended.set()

    def run(self) -> None:
        """The thread."""
        try:
            if self._run_appears():
                self._follow()
        except Exception as error:
            self.problem = in_one_line(error)
            # Into export.log at once: the end of the program, where the command tells it, may be days away.
            print(f"{self.name} stopped after step {self.step}: {self.problem}", file=sys.stderr, flush=True)

    def report(self) -> dict[str, Any]:
        """How far it came, for the one who started it."""
        hanging = "it has not finished; a tracker that does not answer?" if self.is_alive() else ""
        return {"step": self.step, "problem": self.problem or hanging, "notes": self.notes, "unmet": self.unmet}

    def _run_appears(self) -> bool:
        path = self._folder / manifests.name(0)
        while not path.exists():
            if self._ended.wait(POLL):
                return path.exists()
        return True

    def _follow(self) -> None:
        exporter, tail = self._make(), Tail(self._folder, self._sites)
        exporter.begin(self._folder.resolve().name, facts_of(manifests.read(self._folder).get("meta", {})))
        ended = False
        while not ended:
            ended = self._ended.wait(POLL)  # asked before reading: after the end there is nothing new
            self._take_over(exporter, tail, final=ended)
            self.notes, self.unmet = tail.notes, tail.unmet
        run = open_run(self._folder)
        for note in run.meta.get("notes", ()):
            exporter.event(Event(self.step, 0.0, "note", str(note)))
        exporter.close(run.status)

    def _take_over(self, exporter: Exporter, tail: Tail, *, final: bool) -> None:
        for points in tail.points(final=final):
            for begin in range(0, len(points), AT_ONCE):
                exporter.scalars(points[begin : begin + AT_ONCE])
            self.step = points[-1].step if points else self.step
        for look in tail.looks():
            exporter.look(look)
        for event in tail.events():
            exporter.event(event)
        exporter.flush()


def facts_of(meta: dict[str, Any]) -> dict[str, str]:
    """What run.json knows when a run begins, flat and as text; nothing that is empty.

    >>> facts_of({"command": "train.py", "recipe": None, "versions": {"torch": "2.13.0"}})
    {'command': 'train.py', 'versions/torch': '2.13.0'}
    """
    flat: dict[str, str] = {}
    for key, value in meta.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{name}": str(inner) for name, inner in value.items() if not isinstance(inner, dict | list)}
        elif isinstance(value, str | int | float) and value != "":
            flat[key] = str(value)
    return flat
