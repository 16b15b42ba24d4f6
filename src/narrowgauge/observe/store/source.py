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
from typing import Any, TypeVar

import duckdb
import numpy.typing as npt

from narrowgauge.errors import RunError, UsageError
from narrowgauge.observe.store.cause import cause as why
from narrowgauge.observe.store.database import connect, spill
from narrowgauge.observe.store.schema import KEYS, KINDS, ROLLUPS, Kind, Segment, live
from narrowgauge.observe.store.segments import literal
from narrowgauge.observe.store.table import plain_column

Array = npt.NDArray[Any]

QUERY = "SQL, such as 'SELECT max(amax) FROM tensors'"  # as messages show one
MANY = 16  # groups of segments with the same columns; beyond, DuckDB unites them itself

Result = TypeVar("Result")

# What DuckDB raises for a query that is wrong in itself; anything else may come from a file.
WRONG_QUERY = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)


def segments_in(directory: Path) -> list[Segment]:
    """The live segments of one folder of a run, sorted by rank and span."""
    entries = os.listdir(directory) if directory.is_dir() else []
    return live(segment for segment in map(Segment.parse, entries) if segment is not None)


def parquet(files: Iterable[Path], *, by_name: bool = True) -> str:
    """The DuckDB table function that reads these files as one table.

    `by_name` opens every file to unite their columns before the query is planned; files known to have the same
    columns do without.
    """
    names = ", ".join(literal(file) for file in files)
    return f"read_parquet([{names}], union_by_name = {by_name}, hive_partitioning = false)"


def not_superseded(starts: Iterable[tuple[int, int]]) -> str:
    """The condition under which a row counts, as SQL: `starts` are later attempts and the first step of each."""
    return " AND ".join(f"NOT (attempt < {attempt} AND step >= {step})" for attempt, step in starts) or "true"


class _NoSegmentError(Exception):
    """A file with the name of a segment has not the columns of one."""


class Source:
    """DuckDB over the live segments of a folder, looked at anew for every question."""

    def __init__(self, folder: Path, *, skip_corrupt: bool = False) -> None:
        self.folder = folder
        self._skip_corrupt = skip_corrupt
        self._skipped: set[Path] = set()
        self._listed: dict[Kind, list[Path]] = {}
        self._seen: dict[Kind, list[Path]] = {}  # what the views show
        self._columns_of: dict[Path, tuple[str, ...]] = {}
        self._counts = "true"  # the condition under which a row counts
        # Of the segments that the last question saw: metric columns in order, and those that are histograms.
        self.metrics: tuple[str, ...] = ()
        self.histograms: frozenset[str] = frozenset()
        try:
            self._db = connect(spill())
        except OSError as error:
            raise RunError(f"{folder} cannot be read: {why(error)}.") from error

    def ask(self, question: Callable[[duckdb.DuckDBPyConnection], Result]) -> Result:
        """The answer to a question put to the current segments.

        A writer may merge small segments while we read: what vanished is looked for again. Errors: RunError
        that names the segments that cannot be read, or says why the query is wrong.
        """
        for _ in range(5):
            try:
                self._refresh()
            except (duckdb.Error, _NoSegmentError) as error:
                self._handle(error)
                continue
            try:
                return question(self._db)
            except WRONG_QUERY as error:
                raise RunError(f"the query on {self.folder} is wrong: {error}") from error
            except duckdb.Error as error:
                self._handle(error)
        raise RunError(f"{self.folder} changes faster than it can be read. Try again when its writer has closed it.")

    def rows(self, query: str, parameters: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """What a query finds, row by row."""
        given = list(parameters)
        return self.ask(lambda db: db.execute(query, given).fetchall())

    def columns(
        self, query: str | Callable[[], str], parameters: list[Any] | dict[str, Any] | None = None
    ) -> dict[str, Array]:
        """What a query finds, column by column; one that names segments is made when they have been looked at."""

        def fetch(db: duckdb.DuckDBPyConnection) -> dict[str, Any]:
            asked = query if isinstance(query, str) else query()
            answer: duckdb.DuckDBPyConnection | None = db.execute(asked, parameters or [])
            if answer is None:
                raise UsageError(f"the query is empty; expected {QUERY}.")
            return answer.fetchnumpy()

        return {name: plain_column(values) for name, values in self.ask(fetch).items()}

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
        if not self.folder.is_dir():  # no rows would be an answer that the run never gave
            raise RunError(
                f"{self.folder} is no longer there: it was moved or deleted, or the working directory has changed. "
                "Open the run anew, where it lies now."
            )
        self._listed = now = {kind: self.files(kind) for kind in KINDS}
        if now == self._seen:
            return
        self._seen = {}
        for kind, files in now.items():
            self._db.execute(
                f"CREATE OR REPLACE VIEW all_{kind} AS {self._union(kind, files)}{self._without_rows(kind)}"
            )
        self._counts = self._not_superseded()
        for kind in KINDS:
            where = "true" if kind == "events" else self._counts  # what happened before a resume did happen
            self._db.execute(f"CREATE OR REPLACE VIEW {kind} AS SELECT * FROM all_{kind} WHERE {where}")
        described = [row[:2] for row in self._db.execute("DESCRIBE tensors").fetchall()]
        self.metrics = tuple(name for name, _ in described if name not in KEYS["tensors"])
        self.histograms = frozenset(name for name, sql_type in described if sql_type.endswith("[]"))
        self._seen = now

    def tensor_ranks(self) -> list[int]:
        """The ranks that have tensor rows, ascending; for use within `ask`."""
        return sorted({_rank(file) for file in self._seen.get("tensors", [])})

    def tensors_of(self, rank: int) -> str:
        """A FROM item for one rank's tensor rows; for use within `ask`. Reading no other file beats any filter."""
        seen = self._seen.get("tensors", [])
        files = [file for file in seen if _rank(file) == rank]
        # What only other ranks have recorded is a column here, too: without rows.
        others = (
            ""
            if len(files) == len(seen) and not self._skipped
            else " UNION ALL BY NAME SELECT * FROM all_tensors WHERE false"
        )
        rows = f"SELECT * FROM ({self._union('tensors', files)}){others}"
        return f"(SELECT * FROM ({rows}) WHERE {self._counts})"

    def _union(self, kind: Kind, files: list[Path]) -> str:
        """A query for all rows of these segments, whose columns may differ."""
        if not files:
            columns = ", ".join(f"NULL::{sql} AS {name}" for name, sql in KEYS[kind].items())
            return f"SELECT {columns} WHERE false"
        self._learn_columns(kind, files)
        groups: dict[tuple[str, ...], list[Path]] = {}
        for file in files:
            groups.setdefault(self._columns_of.get(file, ()), []).append(file)
        if len(groups) > MANY or () in groups:
            return f"SELECT * FROM {parquet(files)}"
        return " UNION ALL BY NAME ".join(f"SELECT * FROM {parquet(same, by_name=False)}" for same in groups.values())

    def _without_rows(self, kind: Kind) -> str:
        """The columns of segments that are skipped, as far as they could be read: a question that led to them asks for
        these, and is no wrong one. Read with nothing but their footers.
        """
        known = [file for file in sorted(self._skipped) if file.parent.name == kind and file in self._columns_of]
        tables = (parquet([file], by_name=False) for file in known if file.exists())
        return "".join(f" UNION ALL BY NAME SELECT * FROM (SELECT * FROM {table} WHERE false)" for table in tables)

    def _learn_columns(self, kind: Kind, files: list[Path]) -> None:
        """Names and types of the columns of segments not seen before, in one query.

        United by name, rows of a file of another kind would be rows without a site or step.
        """
        new = [file for file in files if file not in self._columns_of]
        if not new:
            return
        names = ", ".join(literal(file) for file in new)
        found: dict[str, list[str]] = {}
        named: dict[str, set[str]] = {}
        rows = self._db.execute(
            "SELECT file_name, name, concat_ws(' ', name, type, num_children, converted_type) "
            f"FROM parquet_schema([{names}])"
        )
        for file, name, column in rows.fetchall():
            found.setdefault(file, []).append(column)
            named.setdefault(file, set()).add(name)
        if any(KEYS[kind].keys() - columns for columns in named.values()):
            raise _NoSegmentError
        self._columns_of |= {Path(file): tuple(columns) for file, columns in found.items()}

    def _not_superseded(self) -> str:
        """The condition under which a row of tensors or scalars counts, as SQL."""
        if not self._resumed():
            return "true"
        starts = self._db.execute(
            "SELECT attempt, min(step) FROM (SELECT attempt, step FROM all_tensors UNION ALL "
            "SELECT attempt, step FROM all_scalars) WHERE attempt > 0 GROUP BY attempt ORDER BY attempt"
        ).fetchall()
        return not_superseded(starts)

    def _resumed(self) -> bool:
        """Whether any rank was; a damaged or missing manifest leaves the question to the rows."""
        try:
            found = [json.loads(file.read_text(encoding="utf-8")) for file in self.folder.glob("run*.json")]
            return not found or any(manifest.get("attempt", 0) > 0 for manifest in found)
        except (OSError, ValueError, AttributeError, TypeError):
            return True

    def _handle(self, error: Exception) -> None:
        """Return if asking again makes sense; otherwise raise what the user needs to know."""
        self._seen = {}
        if self._listed != {kind: self.files(kind) for kind in KINDS}:
            return  # segments were merged while we read
        damaged = {file: cause for kind in KINDS for file in self.files(kind) if (cause := _damage(kind, file))}
        if not damaged:
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


def _rank(file: Path) -> int:
    segment = Segment.parse(file.name)
    return -1 if segment is None else segment.rank


def _damage(kind: Kind, file: Path) -> str:
    """Why a segment cannot be read to its end; "" if it can, or if it is no longer there."""
    try:
        with connect(spill()) as db:
            db.execute(f"SELECT bit_xor(hash(COLUMNS(*))) FROM {parquet([file])}").fetchall()
            named = {name for (name,) in db.execute(f"SELECT name FROM parquet_schema({literal(file)})").fetchall()}
    except duckdb.Error as error:
        return _one_line(error) if file.exists() else ""
    missing = [name for name in KEYS[kind] if name not in named]
    return f"it is no segment of a run's {kind}: it has no column {missing[0]}" if missing else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).partition("LINE 1:")[0].split())  # behind it comes a query that nobody wrote
