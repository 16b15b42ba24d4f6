"""MLflow: one run, through its client and in batches; the active run of the program itself is left alone.

An event counts under `events/KIND` and leaves its last sentence as a tag; what a name may not have (`<`, `[`) is `_`.
Its client asks a server that does not answer again for minutes; the first time, unless the user said how often, once.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from narrowgauge.observe.export.exporter import Event, Exporter, Look, Point

BATCH = {"metrics": 1000, "params": 100, "tags": 100}  # the most that a server takes at once
LONGEST = 500  # characters of a parameter or a tag that every version takes
FIRST = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}  # seconds
STATUS = {"complete": "FINISHED", "stopped": "FINISHED", "killed": "KILLED"}


class MLflow(Exporter):
    """Settings: `uri` of the tracking server (without it MLflow's own default), `experiment`."""

    def __init__(self, folder: Path, table: Mapping[str, Any]) -> None:
        super().__init__(folder, table)
        self._uri, self._experiment = table.get("uri"), table.get("experiment") or "narrowgauge"
        self._events: Counter[str] = Counter()
        self._worst: dict[str, str] = {}

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        """Create the run, and the experiment if there is none of that name."""
        self._client = MlflowClient(tracking_uri=self._uri)
        ours = {key: value for key, value in FIRST.items() if key not in os.environ}
        os.environ.update(ours)
        try:
            known = self._client.get_experiment_by_name(self._experiment)
        finally:
            for key in ours:
                del os.environ[key]
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        self._log("params", [Param(key, value[:LONGEST]) for key, value in facts.items()])

    def scalars(self, points: Sequence[Point]) -> None:
        """Many steps in one call."""
        self._log("metrics", [m for p in points for m in _metrics(p.step, p.wall_time, "run", p.values)])

    def look(self, look: Look) -> None:
        """The numbers, and the worst sites that changed as tags."""
        self._log("metrics", _metrics(look.step, look.wall_time, "tensors", look.numbers()))
        news = {name: site for name, site in look.worst().items() if site and self._worst.get(name) != site}
        self._worst |= news
        self._log("tags", [RunTag(f"worst/{name}", site[:LONGEST]) for name, site in news.items()])

    def event(self, event: Event) -> None:
        """How many of its kind there were so far, and the sentence."""
        self._events[event.kind] += 1
        count = {event.kind: float(self._events[event.kind])}
        self._log("metrics", _metrics(event.step, event.wall_time, "events", count))
        self._log("tags", [RunTag(f"events/{event.kind}", event.line()[:LONGEST])])

    def close(self, status: str) -> None:
        """End the run."""
        self._client.set_terminated(self._run, STATUS.get(status, "FAILED"), end_time=int(time.time() * 1000))

    def _log(self, what: str, rows: Sequence[Any]) -> None:
        for begin in range(0, len(rows), BATCH[what]):
            self._client.log_batch(self._run, **{what: rows[begin : begin + BATCH[what]]})


def _metrics(step: int, when: float, folder: str, values: Mapping[str, float]) -> list[Metric]:
    return [Metric(re.sub(r"[^\w./ -]", "_", f"{folder}/{n}"), v, int(when * 1000), step) for n, v in values.items()]
