"""Tail: what a run's first rank has recorded since one last looked, each row once, in order.

    segments on disk      0  1  2  ...  14           then, at once,   0-15 (merged)      16 ...
    read so far           0  1  2  ...  14                            15 is in there: the rows after the last step that
                                                                      was read, and what that step had not yet

A segment that was not read before is taken whole. One that a merge has put together from some that were read is
filtered: steps never go back within a run, so the last step that was seen tells old rows from new ones.

Of a run that was resumed, only what counts goes out: nothing, until it is known at which step the last attempt began.

Scalars wait until nobody will say more of their step:

    one rank         one more segment was read
    ranks merge      what all of them say was read, of it or of a later step: it takes the place of what the first said;
                     or it did not come in the steps that a merge takes, which the first rank told (`merged_within`)
    in any case      FAR steps later, or at the end

They are read CHUNK rows at a time: whoever reads late finds many segments merged into one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from narrowgauge.errors import RunError
from narrowgauge.observe.export.exporter import Event, Look, Point
from narrowgauge.observe.export.names import HIDDEN, METRICS
from narrowgauge.observe.export.summing import Chosen, summaries_of, summing_query
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.database import connect, spill
from narrowgauge.observe.store.schema import KINDS, Kind
from narrowgauge.observe.store.segments import literal
from narrowgauge.observe.store.source import not_superseded, parquet, segments_in

Rows = list[tuple[Any, ...]]
RANK = 0
RENEW = 500  # reads, half an hour of training or more
CHUNK = 20_000  # rows that are Python's at a time
FAR = 4096  # steps: a rank keeps no more for the others, so that nothing is merged later
_FIRST = "SELECT attempt, min(step) FROM {} WHERE attempt > 0 GROUP BY attempt"


class Told(NamedTuple):
    """What was read of a step, and when each of its numbers was said."""

    point: Point
    at: dict[str, float]


class Tail:
    """Reads a run's folder as it grows. `notes` says what could not be read, `unmet` what was asked in vain."""

    def __init__(self, folder: Path, sites: Sequence[str] = ()) -> None:
        self._folder = folder
        self._chosen = Chosen(sites)
        self._db = self._open()
        self._reads = 0  # since DuckDB was opened
        self._counting = ""  # the condition for rows that no later attempt has made again; "" while that is not known
        self._done: dict[Kind, int] = dict.fromkeys(KINDS, -1)  # the last segment read
        self._pending: dict[int, Told] = {}
        self._out = self._newest = self._look_step = -1  # the last step that went out; that was read
        self._merged = -1  # the last of which all ranks together were heard
        self._within = 0  # steps until they are
        self._roles: set[str] = set()  # what was read of the last recorded step
        self._events: set[int] = set()
        self._times: dict[int, float] = {}  # of the steps last read: rows of tensors have no time of their own
        self._time = 0.0
        self._unreadable: list[str] = []

    @property
    def notes(self) -> list[str]:
        """What could not be read, and so was not exported."""
        return list(self._unreadable)

    @property
    def unmet(self) -> list[str]:
        """What the settings ask for and was not exported."""
        return self._chosen.unmet()

    def points(self, *, final: bool = False) -> Iterator[list[Point]]:
        """Steps whose scalars are settled, or all if it is `final`: in order, a list per some thousand rows."""
        self._times = {}
        if not self._knows_attempts(final):
            return
        hidden = f"name NOT IN ({', '.join(map(literal, sorted(HIDDEN)))})"

        def read(table: str, _: bool) -> Iterator[Rows]:
            columns, where = "step, wall_time, name, value", f"{hidden} AND step > {self._out} AND {self._counting}"
            self._db.execute(f"SELECT {columns} FROM {table} WHERE {where} ORDER BY step, wall_time, name")
            while rows := self._db.fetchmany(CHUNK):  # which may end within a step
                yield rows

        done, before = None, self._newest
        for rows in self._batches("scalars", read):
            if self._done["scalars"] != done:  # it begins another segment
                done, before = self._done["scalars"], self._newest
                self._ask()
            for step, when, name, value in rows:
                self._take(step, float(when), name, float("nan") if value is None else float(value))
            late = min(before, self._newest - self._within)
            settled = max(late, self._merged if self._within else -1, self._newest - FAR)
            yield from self._settle(min(settled, rows[-1][0] - 1) if len(rows) == CHUNK else settled)
        if final:
            yield from self._settle(self._newest)

    def _ask(self) -> None:
        """How many steps a merge takes, as the first rank has said before its second segment, if ever."""
        with contextlib.suppress(OSError, RunError):  # as it was
            self._within = int(manifests.read(self._folder, RANK).get("meta", {}).get("merged_within") or 0)

    def _take(self, step: int, when: float, name: str, value: float) -> None:
        """A number of a step; what was said last counts."""
        told = self._pending.setdefault(step, Told(Point(step, when, {}), {}))
        if when > told.at.get(name, when):
            self._merged = max(self._merged, step)
        told.point.values[name], told.at[name] = value, when
        self._newest = max(self._newest, step)
        self._times[step] = self._time = told.point.wall_time

    def _settle(self, last: int) -> Iterator[list[Point]]:
        """Let the steps up to `last` go out."""
        steps = sorted(step for step in self._pending if step <= last)
        if steps:
            self._out = steps[-1]
            yield [_left(self._pending.pop(step).point) for step in steps]

    def looks(self) -> Iterator[Look]:
        """New recorded steps' tensors; ask for `points` before, that these have their time from."""
        if not self._counting:
            return
        for found in self._batches("tensors", lambda table, seen: iter([self._looks_in(table, seen)])):
            for step, summaries, sites in found:
                self._roles = {s.role for s in summaries} | (self._roles if step == self._look_step else set())
                self._look_step = step
                yield Look(step, self._times.get(step, self._time), summaries, sites)

    def events(self) -> Iterator[Event]:
        """New events."""
        columns = "step, wall_time, kind, message, coalesce(site, '')"
        query = f"SELECT {columns} FROM {{}} ORDER BY step, wall_time"
        for rows in self._batches("events", lambda table, _: iter([self._all(query.format(table))])):
            for row in rows:
                key = hash(row)
                if key not in self._events:
                    self._events.add(key)
                    yield Event(*row)

    def _knows_attempts(self, final: bool) -> bool:
        """Whether it is known which rows count; of an attempt that recorded nothing it is at the end."""
        if self._counting or not (final or (self._folder / manifests.name(RANK)).exists()):
            return bool(self._counting)
        try:
            attempt = int(manifests.read(self._folder, RANK).get("attempt", 0))
        except (OSError, RunError):
            attempt = 0
        starts: dict[int, int] = {}
        for kind in ("scalars", "tensors") if attempt else ():
            files = [self._folder / kind / str(s) for s in segments_in(self._folder / kind) if s.rank == RANK]
            for later, step in self._all(_FIRST.format(parquet(files))) if files else []:
                starts[later] = min(step, starts.get(later, step))
        if final or attempt in (0, *starts):
            self._counting = not_superseded(starts.items())
        return bool(self._counting)

    def _looks_in(self, table: str, seen: bool) -> Rows:
        has = {row[0] for row in self._db.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()}
        metrics = [metric for metric in METRICS if metric in has]
        where = _after(self._look_step, "split_part(site, ':', -1)", self._roles) if seen else "true"
        where += f" AND {self._counting}"
        whole = summaries_of(self._all(summing_query(table, metrics, where)), metrics)
        singles = self._singles(table, metrics, where) if self._chosen.globs else {}
        return [(step, summaries, singles.get(step, {})) for step, summaries in whole.items()]

    def _singles(self, table: str, metrics: Sequence[str], where: str) -> dict[int, dict[str, dict[str, float]]]:
        """The numbers of the sites that go out one by one, by step and site."""
        found: dict[int, dict[str, dict[str, float]]] = {}
        names = [name for (name,) in self._all(f"SELECT DISTINCT site FROM {table} ORDER BY 1")]
        taken = [name for name in names if self._chosen.takes(name)]
        if not taken:
            return found
        inside = f"site IN ({', '.join(map(literal, taken))}) AND {where}"
        rows = self._all(f"SELECT step, site, {', '.join(metrics)} FROM {table} WHERE {inside} ORDER BY step, site")
        for step, site, *values in rows:
            row = {metric: float(value) for metric, value in zip(metrics, values, strict=True) if value is not None}
            found.setdefault(step, {})[site] = row
        return found

    def _open(self) -> duckdb.DuckDBPyConnection:
        return connect(spill(), threads=1, rereads=False)

    def _all(self, query: str) -> Rows:
        return self._db.execute(query).fetchall()

    def _batches(self, kind: Kind, read: Callable[[str, bool], Iterator[Rows]]) -> Iterator[Rows]:
        """What `read(table, partly seen)` finds in each span of segments that is new, the oldest first.

        Of a span that goes while it is read, rows may come again, with those that hold them now.
        """
        while unread := self._unread(kind):
            self._reads += 1
            if self._reads % RENEW == 0:  # it keeps a little of every statement for as long as it is open
                self._db.close()
                self._db = self._open()
            first, last = min(unread)
            files = unread[first, last]
            try:
                yield from read(parquet(files), first <= self._done[kind])
            except duckdb.Error as error:
                if not all(file.exists() for file in files):
                    continue  # a merge took them away meanwhile: look again
                self._unreadable.append(f"export: {files[0].name} of {kind} cannot be read: {error}".split("\n")[0])
            self._done[kind] = last

    def _unread(self, kind: Kind) -> dict[tuple[int, int], list[Path]]:
        spans: dict[tuple[int, int], list[Path]] = {}
        for segment in segments_in(self._folder / kind):
            if segment.rank == RANK and segment.last > self._done[kind]:
                spans.setdefault((segment.first, segment.last), []).append(self._folder / kind / str(segment))
        return spans


def _left(point: Point) -> Point:
    """What was not taken back: where any rank has a brief row, most of a whole one is superseded by no number.

    So is the count of backward calls, which is a number otherwise. A loss may be NaN, and is told to be not finite.
    """
    values = point.values
    if not math.isnan(values.get("microbatches", 0.0)):
        return point
    may_be = {"eval_loss"} | ({"loss"} if values.get("nonfinite") == 1.0 else set())
    return replace(point, values={name: v for name, v in values.items() if name in may_be or not math.isnan(v)})


def _after(step: int, column: str, seen: set[str]) -> str:
    """The condition for rows after a step, and for those of it that were not seen."""
    known = f" OR (step = {step} AND {column} NOT IN ({', '.join(map(literal, sorted(seen)))}))" if seen else ""
    return f"(step > {step}{known})"
