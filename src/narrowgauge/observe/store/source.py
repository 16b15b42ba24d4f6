"""The segments of a run folder as DuckDB views: which files count, and what to do about a damaged one.

    view tensors = every row of the live segments that no later attempt recorded again

A row is superseded when a later attempt (a resumed run) started at its step or before:
attempt(row) < a and step(row) >= first step of attempt a.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import duckdb

from narrowgauge.errors import RunError
from narrowgauge.observe.store.schema import KEYS, KINDS, ROLLUPS, Kind, Segment, live
from narrowgauge.observe.store.segments import literal

Result = TypeVar("Result")

# What DuckDB raises for a query that is wrong in itself; anything else may come from a file.
WRONG_QUERY = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)


def segments_in(directory: Path) -> list[Segment]:
    """The live segments of one folder of a run, sorted by rank and span."""
    entries = os.listdir(directory) if directory.is_dir() else []
    return live(segment for segment in map(Segment.parse, entries) if segment is not None)


def parquet(files: Iterable[Path]) -> str:
    """The DuckDB table function that reads these files as one table, columns matched by name."""
    names = ", ".join(literal(file) for file in files)
    return f"read_parquet([{names}], union_by_name = true, hive_partitioning = false)"


class Source:
    """DuckDB over the live segments of a folder, looked at anew for every question."""

    def __init__(self, folder: Path, *, skip_corrupt: bool = False) -> None:
        self.folder = folder
        self._skip_corrupt = skip_corrupt
        self._skipped: set[Path] = set()
        self._seen: dict[Kind, list[Path]] = {}
        self.metrics: tuple[str, ...] = ()  # of the segments that the last question saw
        self._db = duckdb.connect()

    def ask(self, question: Callable[[duckdb.DuckDBPyConnection], Result]) -> Result:
        """The answer to a question put to the current segments.

        A writer may merge small segments while we read: what vanished is looked for again. Errors: RunError
        that names the segments that cannot be read, or says why the query is wrong.
        """
        for _ in range(5):
            try:
                self._refresh()
            except duckdb.Error as error:
                self._handle(error)
                continue
            try:
                return question(self._db)
            except WRONG_QUERY as error:
                raise RunError(f"the query on {self.folder} is wrong: {error}") from error
            except duckdb.Error as error:
                self._handle(error)
        raise RunError(f"{self.folder} changes faster than it can be read. Try again when its writer has closed it.")

    def files(self, kind: Kind) -> list[Path]:
        """The live segments of one kind that are not skipped."""
        directory = self.folder / kind
        found = (directory / str(segment) for segment in segments_in(directory))
        return [file for file in found if file not in self._skipped]

    def rollup(self, rank: int) -> list[Path]:
        """The roll-up files of a rank if they stand for exactly its live tensor segments, else none."""
        covered = [segment for segment in segments_in(self.folder / "tensors") if segment.rank == rank]
        rollups = [segment for segment in segments_in(self.folder / ROLLUPS) if segment.rank == rank]
        if not covered or not rollups or self._skipped:
            return []
        span = (covered[0].first, covered[-1].last)
        fits = all((rollup.first, rollup.last) == span for rollup in rollups)
        return [self.folder / ROLLUPS / str(rollup) for rollup in rollups] if fits else []

    def _refresh(self) -> None:
        """Point the views at the segments that are there now."""
        now = {kind: self.files(kind) for kind in KINDS}
        if now == self._seen:
            return
        self._seen = {}
        for kind, files in now.items():
            if files:
                source = f"SELECT * FROM {parquet(files)}"
            else:
                columns = ", ".join(f"NULL::{sql} AS {name}" for name, sql in KEYS[kind].items())
                source = f"SELECT {columns} LIMIT 0"
            self._db.execute(f"CREATE OR REPLACE VIEW all_{kind} AS {source}")
        counts = self._not_superseded()
        for kind in KINDS:
            where = "true" if kind == "events" else counts  # what happened before a resume did happen
            self._db.execute(f"CREATE OR REPLACE VIEW {kind} AS SELECT * FROM all_{kind} WHERE {where}")
        described = self._db.execute("DESCRIBE tensors").fetchall()
        self.metrics = tuple(row[0] for row in described if row[0] not in KEYS["tensors"])
        self._seen = now

    def _not_superseded(self) -> str:
        """The condition under which a row of tensors or scalars counts."""
        if not self._resumed():
            return "true"
        starts = self._db.execute(
            "SELECT attempt, min(step) FROM (SELECT attempt, step FROM all_tensors UNION ALL "
            "SELECT attempt, step FROM all_scalars) WHERE attempt > 0 GROUP BY attempt ORDER BY attempt"
        ).fetchall()
        return (
            "true"
            if not starts
            else " AND ".join(f"NOT (attempt < {attempt} AND step >= {step})" for attempt, step in starts)
        )

    def _resumed(self) -> bool:
        """Whether any rank was; a damaged or missing manifest leaves the question to the rows."""
        try:
            found = [json.loads(file.read_text(encoding="utf-8")) for file in self.folder.glob("run*.json")]
            return not found or any(manifest.get("attempt", 0) > 0 for manifest in found)
        except (OSError, ValueError, AttributeError):
            return True

    def _handle(self, error: duckdb.Error) -> None:
        """Return if asking again makes sense; otherwise raise what the user needs to know."""
        before, self._seen = self._seen, {}
        if before and before != {kind: self.files(kind) for kind in KINDS}:
            return
        damaged = {file: cause for kind in KINDS for file in self.files(kind) if (cause := _damage(file))}
        if not damaged:
            if any(not file.exists() for files in before.values() for file in files):
                return
            raise RunError(f"reading {self.folder} failed: {_one_line(error)}") from error
        names = ", ".join(str(file.relative_to(self.folder)) for file in damaged)
        cause = next(iter(damaged.values()))
        if not self._skip_corrupt:
            raise RunError(
                f"{self.folder}: {names} cannot be read ({cause}). It was damaged or copied only in part: "
                f"restore it, or go on without its rows by open_run({str(self.folder)!r}, skip_corrupt=True)."
            ) from error
        self._skipped |= set(damaged)
        warnings.warn(f"{self.folder}: going on without {names}, which cannot be read ({cause}).", stacklevel=6)


def _damage(file: Path) -> str:
    """Why a segment cannot be read to its end; "" if it can, or if it is no longer there."""
    try:
        with duckdb.connect() as db:
            db.execute(f"SELECT bit_xor(hash(COLUMNS(*))) FROM {parquet([file])}").fetchall()
    except duckdb.Error as error:
        return _one_line(error) if file.exists() else ""
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
