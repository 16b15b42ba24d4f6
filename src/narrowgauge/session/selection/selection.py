"""What a run records of what it could: the `[watch]` table of the settings at work.

    step     in a range of `steps`, and one that `every` divides; a step named alone counts whatever `every` says;
             where optimizers take turns, the next ones as well, until each had one (turns.py)
    site     `sites`, `skip` and `roles`
    metric   the others' columns are not stored

A layer of which nothing is selected is not looked at. What was asked for and never found is told at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from narrowgauge.metrics import CATALOG, COLUMNS, ROLES, finalize
from narrowgauge.observe.stats.again import Gate
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.selection.globs import SiteGlobs
from narrowgauge.session.selection.seldom import Seldom
from narrowgauge.session.selection.step_ranges import StepRanges
from narrowgauge.session.selection.turns import Turns

Array = npt.NDArray[Any]


class Selection:
    """The steps, sites and metrics that are recorded.

    Args:
        watch: the `[watch]` table as plain data; an empty one selects everything.
        every: the cadence, in steps.

    Attributes:
        first: the first step that was recorded, or was to be if it did not end; None without one.
        seldom: whether the open step is one of the few that all recipes look at.
        gate: whether tensors that lie as those before them did may go the shorter way.
    """

    def __init__(self, watch: Mapping[str, Any], every: int) -> None:
        self._every = max(1, every)
        self._ranges = StepRanges(watch.get("steps", ()))
        self._alone = StepRanges(span for span in self._ranges.spans if span[0] == span[1])
        self.sites = SiteGlobs("watch.sites", watch.get("sites", ()), watch.get("skip", ()), watch.get("roles", ()))
        globs = watch.get("metrics") or ["*"]
        self.metrics = frozenset(name for name in COLUMNS if any(fnmatchcase(name, glob) for glob in globs))
        self._named = [name for name in globs if name in COLUMNS]
        self._turns, self._few = Turns(), Seldom()
        self.first: int | None = None
        self.seldom = False
        self.gate = Gate()
        self._found: set[str] = set()
        self._recorded = self._steps = 0
        self._stored = self._kept = False

    @property
    def missed(self) -> bool:
        """Whether steps were recorded, and there was no tensor to select."""
        return self._recorded > 0 and not self.sites.asked

    @property
    def paused(self) -> bool:
        """Whether an optimizer tries something: nothing is looked at."""
        return self.gate.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self.gate.paused = paused

    def due(self, step: int) -> bool:
        """Whether a step that begins is recorded."""
        alone = bool(self._alone.spans) and step in self._alone
        regular = step % self._every == 0 and step in self._ranges
        due = alone or (self._turns.recorded(step, regular) and step in self._ranges)
        self.seldom = self._few.due(step, first=alone or regular, recorded=due)
        self._steps, self._recorded = step, self._recorded + due
        if due and self.first is None:
            self.first = step
        return due

    def next_due(self, step: int) -> int | None:
        """The next step that is recorded; None without one."""
        if self._turns.awaits(step + 1) and step + 1 in self._ranges:
            return step + 1
        alone = self._alone.next(step) if self._alone.spans else None
        regular = self._ranges.next(step, self._every)
        return regular if alone is None else alone if regular is None else min(alone, regular)

    def made(self, steps: int) -> None:
        """The program made so many, of the last ones of which nobody was told."""
        self._steps = steps

    def stepped(self, optimizers: Collection[int]) -> None:
        """These, by their ids, stepped in the open step."""
        self._turns.stepped(optimizers)
        self._few.stepped(optimizers)

    def passed(self, last: Mapping[int, int], gaps: Mapping[int, int]) -> None:
        """As of a recorder."""
        self._turns.passed(last, gaps)
        self._few.passed(last, gaps)

    def columns(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """What is stored of all columns."""
        self._stored = True
        kept = {name: values for name, values in columns.items() if name in self.metrics}
        self._kept = self._kept or bool(kept)
        for name in self._named:
            if name in kept and name not in self._found and np.isfinite(kept[name]).any():
                self._found.add(name)
        return kept

    def names(self, columns: Sequence[str]) -> list[str] | None:
        """Which of these columns are stored; None while `columns` has to look for one that was asked for by name."""
        if len(self._found) < len(self._named):
            return None
        self._stored = True
        chosen = [name for name in columns if name in self.metrics]
        self._kept = self._kept or bool(chosen)
        return chosen

    def notes(self) -> list[str]:
        """What was asked for and not found, one sentence each."""
        notes = self.sites.unmatched()
        if self._ranges.spans and not self._recorded and self._steps:
            notes.append(
                f"watch.steps: nothing was recorded; the program made {self._steps} steps, and of these none is both "
                f"selected and divided by every = {self._every}."
            )
        elif self._stored and (missing := [name for name in self._named if name not in self._found]):
            names = ", ".join(missing)
            notes.append(f"watch.metrics: {names}: no recorded site has it, or it was never a number.{_needs(missing)}")
        elif self._stored and not self._kept:
            notes.append(f"watch.metrics: no recorded site has any of what is selected.{_needs(self.metrics)}")
        return notes


def _needs(metrics: Collection[str]) -> str:
    """What sites must be to have these metrics, a sentence for each need."""
    needs: dict[tuple[str, ...], list[str]] = {}
    for metric in CATALOG.values():
        if metric.name in metrics and (metric.needs or metric.roles != ROLES):
            needs.setdefault((metric.needs, *metric.roles), []).append(metric.name)
    return "".join(
        f" {', '.join(names)} {'is' if len(names) == 1 else 'are'} of {', '.join(roles)}{need and f'; {need}'}."
        for (need, *roles), names in needs.items()
    )


class Columns:
    """A run's writer that is given only the metrics that are selected.

    Args:
        writer: asked for it, each time that there is something to write; None if it cannot be written.
        selection: of the metrics.
    """

    def __init__(self, writer: Callable[[], RunWriter | None], selection: Selection) -> None:
        self._writer, self._selection = writer, selection

    def add_tensors(self, step: int, sites: Sequence[str], columns: dict[str, Any]) -> None:
        """Record one row per site."""
        kept = self._selection.columns(columns)
        if kept and (writer := self._writer()):
            if "ranks" in columns:  # no metric: how many ranks the row is of
                kept["ranks"] = columns["ranks"]
            writer.add_tensors(step, sites, kept)

    def add_moments(
        self, step: int, sites: Sequence[str], table: Array, names: Sequence[str], further: Mapping[str, Array]
    ) -> None:
        """Record one row per site, of packed moments."""
        chosen = self._selection.names(names)
        if chosen is None:
            self.add_tensors(step, sites, {**finalize(table, columns=names), **further})
        elif chosen and (writer := self._writer()):
            kept = {name: further[name] for name in further if name == "ranks" or name in self._selection.metrics}
            writer.add_moments(step, sites, table, chosen, kept)

    def add_event(self, step: int, kind: str, message: str, site: str | None = None, **data: Any) -> None:
        """Record something that happened."""
        if writer := self._writer():
            writer.add_event(step, kind, message, site, **data)
