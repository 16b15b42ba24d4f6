"""Finished lines become rows, of several steps at once where their numbers are on the host.

Between two operations of a program nothing of ours is in the processor's caches, so a row that is made as its step ends
takes several times as long as one of many in a loop. What is held back is there whenever the writer's thread makes a
segment, however long the program pauses.

Where ranks merge what each has told, whole rows are told at once, and behind them brief ones are held back: the last of
these until the next step begins, as an evaluation of its may still come, which is merged with it. A row of a step
before ranks met is no row of theirs.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from narrowgauge.session.steps.line import Line, Short, line_of
from narrowgauge.session.steps.pace import Pace
from narrowgauge.session.steps.turns import Turns
from narrowgauge.session.tensors.deferred import Deferred, Row

TOGETHER, PATIENCE = 16, 0.25  # lines, and seconds since the last ones were told, to whoever asks for the latest
LOCK_SECONDS = 1.0  # for a thread in here: one that was interrupted may wait for whoever waits for it


def _any(line: Line) -> bool:
    """Every line is ready."""
    return True


class Taker(Protocol):
    """What is needed of a `RunWriter`."""

    def add_scalars(self, step: int, **values: float) -> None:
        """Record a step's numbers by name."""


class StepRows:
    """Takes closed lines, and gives their rows away; never waits for the device before the end.

    Args:
        merged: takes the rows.
        several: whether there are other ranks, who wait for each row.
        own: takes those of this rank alone, while there are no others.

    Attributes:
        held, taker: lines that are held back, each with who takes its row; and who takes that of the next.
        told: when the last ones were given away, by `time.perf_counter`.
    """

    def __init__(self, merged: Taker, several: Callable[[], bool], own: Taker) -> None:
        self._merged, self._several, self._own = merged, several, own
        self.held: deque[tuple[Line | Short, Taker]] = deque()
        self.taker = own
        self._lock = threading.RLock()
        self.told = time.perf_counter()
        self._deferred = Deferred()
        self._error: Exception | None = None
        self.pace = Pace()
        self.turns = Turns()
        self.last_loss = float("nan")
        self.nonfinite_steps = self.skipped_steps = 0

    def add(self, line: Line) -> None:
        """A line is finished."""
        if self._several():
            with self._locked():
                self._give(all_of_them=True)
                self.taker = self._merged
                self._deferred.put(self._row(line, self._merged))
            return
        self.hold(line)

    def hold(self, line: Line) -> None:
        """The same of one that may wait: where there are no other ranks, or it is brief."""
        self.held.append((line, self.taker))
        alone = line.recorded
        if not (alone or line.brief):  # of a device
            alone = line.events is not None or (isinstance(line.loss, Tensor) and not line.loss.is_cpu)
        late = len(self.held) >= TOGETHER or time.perf_counter() - self.told > PATIENCE
        if alone or late or self._error is not None:
            self.overdue()

    def overdue(self) -> None:
        """What is held back has been for long enough."""
        self._give_if_free()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def tell(self) -> None:
        """Give away what is held back, as far as it has arrived."""
        with self._locked():
            self._give()

    def turn(self, trainers: Iterable[int]) -> None:
        """A step without a row was made by these: the next number of a turn may be its."""
        with self._locked():
            self._give(all_of_them=True)
            self.turns.of(trainers)

    def gather(self) -> None:
        """The same, asked by the writer's thread: but nothing that a device has yet to give."""
        try:
            self._give_if_free(lambda line: line.on_host and self._deferred.empty, LOCK_SECONDS)
        except Exception as error:
            self._error = error  # told where errors of ours are kept

    def lost(self) -> float:
        """Seconds that the program has lost by being watched so far."""
        self.tell()
        return self.pace.lost()

    def add_to_earlier(self, step: int, writer: Taker, **values: Tensor) -> None:
        """Scalars of a step whose line was closed before, which go to `writer` once they have arrived.

        Of the last one, if ranks merge it, they go with it.
        """
        with self._locked():
            last, taker = self._at(-1) if self.held else (None, None)
            if last is not None and last.step == step and taker is self._merged:
                last.scalars.update(values)
                return
            self._give()
            self._deferred.put(Row(values, lambda row: writer.add_scalars(step, **row)))

    def finish(self) -> None:
        """Write everything that is still on its way."""
        with self._locked():
            self._give(all_of_them=True)
            self._deferred.drain(wait=True)

    def _give_if_free(self, ready: Callable[[Line], bool] = _any, patience: float = 0.0) -> None:
        """Give away the first that are ready, unless another thread does: it goes on with what is left, in order."""
        if self._lock.acquire(timeout=patience):
            try:
                self._give(ready)
            finally:
                self._lock.release()

    def _give(self, ready: Callable[[Line], bool] = _any, *, all_of_them: bool = False) -> None:
        self._deferred.put_all(self._released(ready, all_of_them))
        self.told = time.perf_counter()

    def _released(self, ready: Callable[[Line], bool], all_of_them: bool) -> Iterator[Row]:
        """One by one, as they are asked for: what is wrong with one, or interrupts, costs that one."""
        while self.held:
            line, taker = self._at(0)
            if not ready(line) or (len(self.held) == 1 and taker is self._merged and not all_of_them):
                break
            self.held.popleft()
            yield self._row(line, taker)

    def _at(self, place: int) -> tuple[Line, Taker]:
        line, taker = self.held[place]
        if isinstance(line, tuple):
            line = line_of(line)
            self.held[place] = line, taker
        return line, taker

    def _row(self, line: Line, taker: Taker) -> Row:
        numbers, behind = line.numbers(self.turns.of(line.trainers)), None if line.events is None else line.events[1]
        return Row(numbers, functools.partial(self._write, line, taker), behind)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        held = self._lock.acquire(timeout=LOCK_SECONDS)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def _write(self, line: Line, taker: Taker, row: dict[str, float]) -> None:
        if not line.disturbed:
            if line.events is not None:
                # Both have passed: the row came behind the second (`Row.behind`).
                row["step_seconds"] = line.events[0].elapsed_time(line.events[1]) / 1000.0
            if "step_seconds" in row:
                self.pace.add(row["step_seconds"], recorded=line.recorded)
        elif "step_seconds" in row and not line.recorded:
            self.pace.add_apart(row["step_seconds"])
        if row.get("tokens") and row.get("step_seconds", 0.0) > 0.0:
            row["tokens_per_second"] = row["tokens"] / row["step_seconds"]
        if not row.get("skipped", 1.0):
            del row["skipped"]  # a fused optimizer's own word, which says that it did step
        skipped, finite = "skipped" in row, True
        for name in ("loss",) if skipped else ("loss", "grad_norm", "grad_square_local"):
            finite = finite and math.isfinite(row.get(name, 0.0))
        if "loss" in row or not line.brief:  # or nobody knows
            row["nonfinite"] = float(not finite)
        self.skipped_steps += skipped
        self.nonfinite_steps += not finite
        self.last_loss = row.get("loss", self.last_loss)
        taker.add_scalars(line.step, **row)
