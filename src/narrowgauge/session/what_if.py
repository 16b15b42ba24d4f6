"""What other recipes would make of recorded operands: FP8 readiness, before anyone switches.

rows below 16      left out: no FP8 product takes them, and with a scale for each they lose next to nothing
asked by name      every recorded operand, by every recipe (judge.py)
else               those of products that nobody converted, in few of the recorded steps (selection/seldom.py); one that
                   was in none of these so far (a layer that came later, an expert) where it is first recorded
RUN/what_if/NAME/  a run of its own for each recipe, with the same steps and sites: what reads runs reads these
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.recipes import ROLES, by_name
from narrowgauge.errors import NarrowgaugeError, RunError, in_one_line, let_pass
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.judge import Judge
from narrowgauge.session.selection.selection import Columns, Selection
from narrowgauge.session.sites.judging import plain_math

FOLDER = "what_if"
SHORTEST = 16  # elements of a row that FP8 tensor cores take
PATIENCE = 60.0  # seconds for all of their disks at the end of the program


def judge_of(names: Sequence[str]) -> str:
    """The recipe whose rows are the run's own: the first that keeps no state, `current` if all do; "" of none.

    >>> judge_of(["delayed", "blockwise"])
    'blockwise'
    """
    return next((name for name in names if by_name(name).state == "none"), "current" if names else "")


class WhatIf:
    """All recipes that are asked about, beside the one whose rows are the run's own.

    Args:
        names: the recipes.
        writer: the run's; theirs write into folders below its own.
        selection: the sites and metrics.
        seldom: nobody asked for them by name.

    Attributes:
        problem: why it ended early, if it did.
        collectors: of each recipe, by its name.
    """

    def __init__(self, names: Sequence[str], writer: RunWriter, selection: Selection, *, seldom: bool = False) -> None:
        self.names, self.seldom, self._selection = tuple(names), seldom, selection
        self._weights: set[str] = set()  # seen in the open step
        self._step: int | None = None  # the open step, if it is recorded
        self._open = False  # any operand was, or may be, asked about in it
        self._known: set[str] = set()  # sites that were asked about, in steps before
        self._now: set[str] = set()  # in the open one
        self.problem = ""
        self.seconds = 0.0
        runs = {name: _Run(writer.path / FOLDER / name, name, writer, self._failed) for name in self.names}
        self.collectors = {name: Collector(Columns(run, selection), every=1) for name, run in runs.items()}
        self._judges = [Judge(by_name(name), collector) for name, collector in self.collectors.items()]
        self._runs = runs

    def begin_step(self, step: int, recorded: bool) -> None:
        """Open a step if it is `recorded`."""
        self.end_step()
        self._step = step if recorded and self.names and not self.problem else None
        if not self.seldom or self._selection.seldom:
            self._begin()

    def _begin(self) -> None:
        if self._step is not None and not self._open:
            self._open = True
            for judge in self._judges:
                judge.collector.begin_step(self._step)

    def _asks(self, site: str) -> bool:
        if self.seldom and not self._selection.seldom and site in self._known:
            return False
        self._begin()
        return self._open

    def wants(self) -> bool:
        """Whether the open step is looked at, every operand of it."""
        return self._open and not self.seldom

    @property
    def asking(self) -> bool:
        """Whether the open step is looked at, be it only for some operands."""
        return self._open

    def knows(self, module: str, role: str, x: Tensor) -> bool:
        """Whether an operand x is asked about in no step that is not looked at anyway."""
        return not self.seldom or x.shape[-1] < SHORTEST or f"{module}:{role}" in self._known

    @torch.no_grad()
    def operand(self, module: str, role: str, x: Tensor) -> None:
        """See an operand x [M, K], or the weights [E, N, K] of experts."""
        site, began = f"{module}:{role}", time.perf_counter()
        if self._step is None or role not in ROLES or not x.numel() or x.shape[-1] < SHORTEST or site in self._weights:
            return
        if not self._asks(site):
            return
        if role == "weight":
            self._weights.add(site)
        self._now.add(site)
        try:
            with plain_math(x.device.type):  # the program's autocast refuses to join codes, of experts say
                self._ask_all(module, role, x)
        except Exception as error:
            self._failed(error)
        self.seconds += time.perf_counter() - began

    def _ask_all(self, module: str, role: str, x: Tensor) -> None:
        for judge in self._judges:
            if judge.counted(module, role, x) or (self.seldom and not x.is_cpu):
                continue  # a GPU's memory is the program's: where nobody asked, nothing is made there to be counted
            codes, ratio = judge.quantized(f"{module}:{role}", role, x)
            judge.collector.operand(module, role, x, codes, amax_ratio=ratio)

    def end_step(self) -> None:
        """The step ended."""
        opened, self._step, self._open = self._open, None, False
        if not opened:  # as most are not
            return
        self._weights.clear()
        self._known |= self._now
        self._now.clear()
        for judge in self._judges:
            judge.end_step()
            if self.seldom:
                judge.collector.begin_anew()  # a GPU's room for its sums is the program's until the next such step

    def drop_step(self) -> None:
        """The open step is none."""
        self._step, self._open = None, False
        self._weights.clear()
        self._now.clear()
        for judge in self._judges:
            judge.drop_step()

    def begin_anew(self) -> None:
        """What was seen in the open step so far was none of it."""
        self._weights.clear()
        self._now.clear()
        for judge in self._judges:
            judge.begin_anew()

    def close(self) -> None:
        """The program ended: write everything."""
        self.end_step()
        for judge in self._judges:
            judge.collector.flush()
        deadline = time.monotonic() + PATIENCE
        for run in self._runs.values():  # each is written by a thread of its own
            run.end()
        for run in self._runs.values():
            run.close(deadline)
        self._judges = []

    def facts(self) -> dict[str, Any]:
        """Which recipes, and what asking cost the training thread."""
        return {"recipes": list(self.names), "seconds": self.seconds}

    def _failed(self, error: Exception) -> None:
        self._step, self._open = None, False
        let_pass(error)
        cause = in_one_line(error)
        self.problem = self.problem or f"watch.what_if: it ended early, and rows of it are missing: {cause}"


class _Run:
    """A recipe's run, called for its writer, beside another's.

    It begins with its first row: of ranks that are merged, one has any.
    """

    def __init__(self, path: Path, name: str, beside: RunWriter, failed: Callable[[Exception], None]) -> None:
        self._path, self._name, self._beside, self._failed = path, name, beside, failed
        self._writer: RunWriter | None = None
        self._missing = False

    def __call__(self) -> RunWriter | None:
        if self._writer is None and not self._missing:
            meta = {"variant": self._name, "what_if": True}
            try:
                self._writer = RunWriter(self._path, meta, rank=self._beside.rank, beside=self._beside)
            except (NarrowgaugeError, OSError) as error:
                self._missing = True
                self._failed(error)
        return self._writer

    def end(self) -> None:
        """Nothing more comes."""
        if self._writer is not None:
            self._writer.end()

    def close(self, deadline: float) -> None:
        """Write everything, if the disk takes it until then."""
        if self._writer is not None:
            self._writer.close(timeout=max(0.1, deadline - time.monotonic()))
            if self._writer.problem:
                self._failed(RunError(self._writer.problem))
