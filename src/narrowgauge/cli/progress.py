"""The live display of a comparison: one line per run, with its bar, its loss and what remains."""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from narrowgauge.session.process.codes import describe_code
from narrowgauge.session.process.launch import Ended
from narrowgauge.session.steps.status import Status


class LiveProgress:
    """Bars on a terminal; one plain line per finished run elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Bars(
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[count]:>11}"),
            TextColumn("{task.fields[loss]:>12}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._last = Status()

    def __enter__(self) -> LiveProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, name: str, total: int | None) -> None:
        """A run starts."""
        self._last = Status()
        self._task = self._bars.add_task(name, total=total, count="", loss="")

    def tell(self, status: Status) -> None:
        """A run moved on."""
        self._last = status
        if self._task is not None:
            loss = "" if math.isnan(status.loss) else f"loss {status.loss:.4f}"
            total = self._bars.tasks[self._task].total
            count = f"step {status.step}" + (f"/{total:.0f}" if total else "")
            self._bars.update(self._task, completed=status.step, count=count, loss=loss)

    def end(self, name: str, ended: Ended) -> None:
        """A run ended."""
        if self._task is not None and ended.code == 0:
            total = self._bars.tasks[self._task].total or self._last.step or 1
            self._bars.update(self._task, total=total, completed=total, count=f"step {total:.0f}")
            self._bars.stop_task(self._task)
        if not self._console.is_terminal or ended.code:
            how = "done" if ended.code == 0 else f"ended with {describe_code(ended.code)}"
            self._console.print(f"{name:>10}  {how} after {ended.seconds:.1f} s")
