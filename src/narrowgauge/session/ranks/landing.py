r"""On rank 0: what a gather brought becomes rows of the run, and events where copies are not alike.

rows [world, size] --merge, beside the program's own work--> tables --> the collectors' way to the writers
                   \--copies and scalars--> host --> events, merged scalars
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from narrowgauge.metrics.stages import Stages
from narrowgauge.observe.stats.guard import Marks
from narrowgauge.observe.stats.transfer import HostCopy
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.ranks import laws
from narrowgauge.session.ranks.alike import ALIKE, COMPARED
from narrowgauge.session.ranks.apart import Keep
from narrowgauge.session.ranks.group import Gather
from narrowgauge.session.ranks.layout import Layout
from narrowgauge.session.ranks.merging import Merger
from narrowgauge.session.ranks.parts import Parts, PartsByStep
from narrowgauge.session.ranks.scalars import Joined, Rows, disagreements, rows_of

MOST_EVENTS = 16  # sites of one step that are named one by one
KEPT = 8  # combinations of layouts that are remembered


class Landing:
    """Receives gathers on rank 0.

    Attributes:
        told: the names of all scalars that other ranks have told.
        in_brief: how many merged steps have a brief row.
    """

    def __init__(self, writer: RunWriter, keep: Keep, world: int) -> None:
        self._writer, self._keep = writer, keep
        self._mergers: dict[tuple[str, ...], Merger] = {}
        self._parts = PartsByStep(world)
        self._stages = Stages()
        self._looks: deque[tuple[int, HostCopy, Merger]] = deque()
        self._joined = Joined(world)
        self.told: set[str] = set()
        self.in_brief = 0
        self._mine: set[str] = set()  # those of rank 0
        self._models: Sequence[int] = ()  # of each rank, at the last step
        self._alike: set[str] = set()  # undeclared weights that were the same on all ranks, or began so
        self._apart: set[str] = set()  # sites and scalars that are told to disagree

    def receive(self, step: int, layouts: Sequence[Layout], gather: Gather, marks: Marks) -> None:
        """Merge what a gather brought, where it is; nothing waits for it."""
        assert gather.rows is not None  # rank 0
        with gather.beside():
            gather.check()
            merger = self._merger(layouts, gather)
            operands, results, look = merger(gather.rows)
            copy = HostCopy.start(look)
            self._keep(merger.packed(step, operands, results, marks))
            self._looks.append((step, copy, merger))

    @property
    def waits(self) -> bool:
        """Whether anything has yet to reach the host."""
        return bool(self._looks)

    def look(self, *, wait: bool = False) -> None:
        """Look at what has reached the host."""
        while self._looks and self._looks[0][1].arrived(wait):
            step, copy, merger = self._looks.popleft()
            copies, tables = merger.split(copy.host.numpy())
            self._parts.add(step, Parts.of(merger.layouts, merger.families))
            self._forget_models([one.models for one in merger.layouts])
            self._compare(step, merger, copies)
            for rank, (one, table) in enumerate(zip(merger.layouts, tables, strict=True)):
                self.join(rank, rows_of(table, one.scalars))

    def join(self, rank: int, rows: Rows) -> None:
        """Take a rank's scalars; what is complete is merged and written."""
        (self.told if rank else self._mine).update(*(row for _, row in rows))
        self._joined.add(rank, rows)
        self._write(anyway=False)

    def lacking(self, ranks: Iterable[int]) -> list[int]:
        """The steps that are not merged for want of what any of these ranks has to tell."""
        return self._joined.lacking(ranks)

    def finish(self) -> None:
        """Merge what there is of the steps that not all ranks told of."""
        self.look(wait=True)
        self._write(anyway=True)

    def _write(self, *, anyway: bool) -> None:
        for step, rows in self._joined.complete(anyway=anyway):
            if len(rows) < 2:
                self._write_alone(step, *rows.items())
                continue
            ranks, parts = sorted(rows), self._parts.at(step)
            of = parts.of_ranks(ranks)
            merged = laws.merged([rows[rank] for rank in ranks], of.kinds, of.meshes, of.began, of.families)
            if any(map(laws.in_brief, rows.values())):  # what rank 0 has beside that is of a part of them
                self.in_brief += 1
                merged = dict.fromkeys(rows.get(0, ()), math.nan) | merged
            self._writer.add_scalars(step, **merged)  # supersedes rank 0's own
            found = disagreements(rows, parts.kinds)
            for name in filter(laws.compared, merged):
                self._tell(step, name, None, found.get(name))

    def _write_alone(self, step: int, told: tuple[int, dict[str, float]]) -> None:
        """Of a step that one rank told of, the end: what rank 0 has none of, such as the loss of a last stage.

        Of a step that rank 0 has not made (it had less data, and is done) that is all.
        """
        _, row = told
        had = self._mine if step <= self._writer.newest_scalars else ()
        found = {name: v for name, v in row.items() if name not in had and not name.endswith(laws.PART)}
        self._writer.add_scalars(step, **found)

    def _merger(self, layouts: Sequence[Layout], gather: Gather) -> Merger:
        key = tuple(one.digest for one in layouts)
        if key not in self._mergers:
            if len(self._mergers) >= KEPT:
                self._mergers.pop(next(iter(self._mergers)))
            assert gather.rows is not None
            if self._stages.learn(each for one in layouts for each in (*one.staged_operands, *one.staged_results)):
                self._mergers.clear()
            self._mergers[key] = Merger(layouts, gather.rows.device, self._stages)
        return self._mergers[key]

    def _forget_models(self, models: Sequence[int]) -> None:
        """Hold no model to what was found of another, which may have had the same names."""
        if models != self._models:
            self._models = models
            self._alike.clear()
            self._apart = set(filter(laws.compared, self._apart))

    def _compare(self, step: int, merger: Merger, copies: npt.NDArray[np.float64]) -> None:
        union = merger.operands
        told = 0
        for d, u in enumerate(union.compared):
            site, ranks = union.sites[u], [rank for rank, _ in union.places[u]]
            groups: dict[int | None, list[int]] = {}
            for i, first in enumerate(union.copies[u]):
                groups.setdefault(first, []).append(i)
            differ: dict[int, Any] | None = None
            for first, members in groups.items():
                same = _alike(copies[members, d])
                alone = first is None and len(members) == len(ranks) and not any(union.on_mesh[u])
                varied = same and _varied(*copies[members[0], d].tolist())
                if alone and (varied or _replicas([merger.layouts[rank] for rank in ranks])):
                    self._alike.add(site)
                if not same and (first is not None or site in self._alike):
                    differ = {ranks[i]: dict(zip(COMPARED, copies[i, d].tolist(), strict=True)) for i in members}
            told += self._tell(step, site, site, differ, quiet=told >= MOST_EVENTS)
        if told > MOST_EVENTS:
            message = f"{told - MOST_EVENTS} further sites that ranks hold copies of differ at step {step}"
            self._writer.add_event(step, "replicas_disagree", message)

    def _tell(
        self, step: int, what: str, site: str | None, values: dict[int, Any] | None, *, quiet: bool = False
    ) -> bool:
        """Leave an event when copies begin to differ; whether they did."""
        if values is None:
            self._apart.discard(what)
            return False
        if what in self._apart:
            return False
        self._apart.add(what)
        if not quiet:
            ranks = ", ".join(map(str, values))
            message = f"{what} should be the same on ranks {ranks} and is not, first at step {step}"
            self._writer.add_event(step, "replicas_disagree", message, site, ranks=list(values), values=values)
        return True


def _replicas(layouts: Sequence[Layout]) -> bool:
    """Whether ranks began with the same weights and train the same of them; stages may, but not all have a loss."""
    return bool(layouts[0].began) and len({(one.began, "loss" in one.scalars) for one in layouts}) == 1


def _alike(values: npt.NDArray[np.float64]) -> bool:
    """Whether copies [C, 3] agree; NaN and infinities agree with themselves."""
    first = values[0]
    with np.errstate(invalid="ignore"):
        near = np.abs(values - first) <= ALIKE * np.abs(first)
    return bool((near | (values == first) | (np.isnan(values) & np.isnan(first))).all())


def _varied(numel: float, amax: float, m2: float) -> bool:
    """Whether equal numbers say anything: those of zeros, or of any constant, are the same in layers that are not."""
    return ALIKE * numel * amax**2 < m2
