"""Finished lines become rows: of several steps at once, once their numbers have come from the device.

Between two operations of a program nothing of ours is in the processor's caches, so a row that is made as its step ends
takes several times as long as one of many in a loop. Where ranks merge what each has told, nobody waits for company.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from narrowgauge.session.steps.pace import Pace
from narrowgauge.session.tensors.deferred import Deferred

TOGETHER, PATIENCE = 16, 0.25  # lines, and seconds since the last ones were written
Events = tuple[torch.cuda.Event, torch.cuda.Event] | None


class Closed(NamedTuple):
    """A line that is finished: its scalars, what its time is of, and the events around it on a device."""

    step: int
    scalars: dict[str, float | Tensor]
    recorded: bool
    disturbed: bool
    events: Events


class Taker(Protocol):
    """What is needed of a `RunWriter`."""

    def add_scalars(self, step: int, **values: float) -> None:
        """Record a step's numbers by name."""


class StepRows:
    """Takes closed lines, and gives their rows to a writer; never waits for the device before the end.

    Args:
        writer: takes the rows.
        at_once: whether each has to be told as its step ends, because others wait for it.
    """

    def __init__(self, writer: Taker, at_once: Callable[[], bool]) -> None:
        self._writer, self._at_once = writer, at_once
        self._closed: list[Closed] = []
        self._told = time.perf_counter()
        self._deferred = Deferred()
        self.pace = Pace()
        self.last_loss = float("nan")
        self.nonfinite_steps = self.skipped_steps = 0

    def add(self, line: Closed) -> None:
        """A line is finished."""
        self._closed.append(line)
        company = len(self._closed) < TOGETHER and not line.recorded
        if not company or time.perf_counter() - self._told > PATIENCE or self._at_once():
            self.tell()

    def tell(self) -> None:
        """Write what is finished, as far as it has arrived."""
        closed, self._closed = self._closed, []
        self._deferred.put_all((line.scalars, functools.partial(self._write, line)) for line in closed)
        self._told = time.perf_counter()

    def add_to_earlier(self, step: int, writer: Taker, **values: Tensor) -> None:
        """Scalars of a step whose line was closed before, which go to `writer` once they have arrived."""
        self.tell()
        self._deferred.put(values, lambda row: writer.add_scalars(step, **row))

    def finish(self) -> None:
        """Write everything that is still on its way."""
        self.tell()
        self._deferred.drain(wait=True)

    def _write(self, line: Closed, row: dict[str, float]) -> None:
        if not line.disturbed:
            if line.events is not None:
                # The scalars were copied after the second event, so both have passed.
                row["step_seconds"] = line.events[0].elapsed_time(line.events[1]) / 1000.0
            if "step_seconds" in row:
                self.pace.add(row["step_seconds"], recorded=line.recorded)
        if row.get("tokens") and row.get("step_seconds", 0.0) > 0.0:
            row["tokens_per_second"] = row["tokens"] / row["step_seconds"]
        if not row.get("skipped", 1.0):
            del row["skipped"]  # a fused optimizer's own word, which says that it did step
        skipped, finite = "skipped" in row, True
        for name in ("loss",) if skipped else ("loss", "grad_norm", "grad_square_local"):
            finite = finite and math.isfinite(row.get(name, 0.0))
        row["nonfinite"] = float(not finite)
        self.skipped_steps += skipped
        self.nonfinite_steps += not finite
        self.last_loss = row.get("loss", self.last_loss)
        self._writer.add_scalars(line.step, **row)
