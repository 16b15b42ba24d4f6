"""Rows in memory to one Parquet segment on disk, through DuckDB.

    columns [S] per step  ->  concatenated [R]  ->  sorted by (site, step)  ->  .aside  ->  fsync  ->  rename

Floats are stored byte-stream-split and everything with zstd; NaN becomes NULL, infinities stay. Sites
travel as integer codes and meet their names inside DuckDB, so that no Python string is touched per row and
the interpreter lock stays free for the training thread: DuckDB reads the arrays' memory without it.

Legend: S = sites in one call, R = rows of a segment, B = bins of a histogram.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

from narrowgauge.errors import ShapeError
from narrowgauge.observe.store.database import Shared
from narrowgauge.observe.store.schema import KEYS, SORTED_BY, Kind, Segment

Array = npt.NDArray[Any]

# Rows of a row group: small ones let a series skip what it does not need, but every one adds to the footers that
# the first question has to parse. Compacted, a site's rows lie together and large ones cost nothing.
ROW_GROUP, COMPACTED_ROW_GROUP = 32_768, 122_880
PARQUET = "FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2"


def quoted(name: str) -> str:
    """A column name as an SQL identifier: any character is allowed in it, none can end it."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: object) -> str:
    """A text (a path) as an SQL string: for COPY, which takes no parameter there."""
    return "'" + str(text).replace("'", "''") + "'"


@dataclass(frozen=True)
class Batch:
    """The statistics of one step: `columns[name]` is [S], a number per site, or [S, B], a histogram."""

    step: int
    sites: tuple[str, ...]
    columns: dict[str, Array]

    @classmethod
    def of(cls, step: int, sites: Sequence[str], columns: dict[str, Any]) -> Batch:
        """Copy the caller's arrays, since it may overwrite them; ShapeError if they do not fit."""
        sites = tuple(sites)
        copies = {}
        for name, values in columns.items():
            if name in KEYS["tensors"]:
                raise ShapeError(f"column {name!r} is a key of every tensor row: give the metric another name.")
            array = _storable(name, values)
            if array.ndim not in (1, 2) or len(array) != len(sites) or 0 in array.shape[1:]:
                raise ShapeError(
                    f"column {name!r} has shape {tuple(array.shape)}; expected [{len(sites)}] or "
                    f"[{len(sites)}, bins], one entry for each of the {len(sites)} sites."
                )
            copies[name] = array
        return cls(int(step), sites, copies)

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        return sum(array.nbytes for array in self.columns.values())

    @property
    def layout(self) -> tuple[tuple[str, str, tuple[int, ...], bool], ...]:
        """What two batches must share to be concatenated: names, dtypes, bins, and whether masked."""
        return tuple(
            (name, array.dtype.str, array.shape[1:], isinstance(array, np.ma.MaskedArray))
            for name, array in self.columns.items()
        )


def _storable(name: str, values: Any) -> Array:
    """A private copy in a dtype that Parquet has: float32, float64, int64, uint32."""
    masked = isinstance(values, np.ma.MaskedArray)
    array = values if masked else np.asarray(values)
    target: np.dtype[Any]
    if array.dtype in (np.float32, np.float64) or (array.dtype == np.uint32 and array.ndim == 2):
        target = array.dtype
    elif array.dtype.kind in "iub":
        target = np.dtype(np.int64)
    elif array.dtype == np.float16:
        target = np.dtype(np.float32)
    else:
        raise ShapeError(f"column {name!r} has dtype {array.dtype}; expected a float or integer dtype.")
    return array.astype(target, order="C", copy=True)


def _joined(parts: list[Array], masked: bool) -> tuple[Array, Array | None]:
    """Arrays of several steps end to end, and which rows hold a value if some are masked."""
    if not masked:
        return np.concatenate(parts), None
    mask: Array = np.concatenate([np.ma.getmaskarray(part) for part in parts])
    values = np.concatenate([np.ma.getdata(part) for part in parts])
    return values, np.logical_not(mask.reshape(len(mask), -1).any(axis=1))


class SegmentWriter:
    """Turns rows into the segments of one rank; used by one thread alone, the writer's.

    Its DuckDB is that of all that have the same `shared`.
    """

    def __init__(self, folder: Path, rank: int, attempt: int, next_index: dict[Kind, int], shared: Shared) -> None:
        self._folder, self._rank, self._attempt, self._shared = folder, rank, attempt, shared
        self._next = dict(next_index)
        self._codes: dict[str, int] = {}
        self._codes_of: dict[tuple[str, ...], Array] = {}
        self._mixed: dict[str, set[str]] = {}
        self.written: list[tuple[Kind, int]] = []  # segments not yet looked at for merging
        self._db: duckdb.DuckDBPyConnection | None = None

    def try_open(self) -> None:
        """Open DuckDB, and close it: whoever begins a run is told whether that can be done."""
        self._db = self._open()
        self.close()

    def tensors(self, batches: Sequence[Batch]) -> None:
        """Write one segment with the rows of all batches."""
        groups: dict[Any, list[Batch]] = {}
        for batch in batches:
            groups.setdefault(batch.layout, []).append(batch)
        for layout in groups:
            for name, dtype, bins, _ in layout:
                if not bins:
                    self._mixed.setdefault(name, set()).add(np.dtype(dtype).kind)
        selects, tables = [], []
        for number, members in enumerate(groups.values()):
            table, select = self._group(members, f"group{number}")
            tables.append(table)
            selects.append(select)
        self._write("tensors", " UNION ALL BY NAME ".join(selects), tables)

    def scalars(self, rows: Sequence[tuple[int, str, float, float]]) -> None:
        """Write (step, name, value, wall time) rows as one segment."""
        steps, names, values, times = zip(*rows, strict=True)
        columns = {
            "step": np.array(steps, np.int64), "name": np.array(names, object),
            "value": np.array(values, np.float64), "wall_time": np.array(times, np.float64),
        }  # fmt: skip
        self._rows("scalars", columns)

    def events(self, rows: Sequence[tuple[int, str, str | None, str, str, float]]) -> None:
        """Write (step, kind, site, message, data as JSON, wall time) rows as one segment."""
        steps, kinds, sites, messages, data, times = zip(*rows, strict=True)
        columns = {
            "step": np.array(steps, np.int64), "kind": np.array(kinds, object),
            "site": np.array([site or "" for site in sites], object), "message": np.array(messages, object),
            "data": np.array(data, object), "wall_time": np.array(times, np.float64),
        }  # fmt: skip
        self._rows("events", columns)

    @property
    def db(self) -> duckdb.DuckDBPyConnection:
        """DuckDB, open from now until `close`."""
        if self._db is None:
            self._db = self._open()
        return self._db

    def _open(self) -> duckdb.DuckDBPyConnection:
        db = self._shared.join(self._folder / ".spill")
        db.execute("CREATE TEMP TABLE sites (code INTEGER, name VARCHAR)")
        return db

    def close(self) -> None:
        """Release DuckDB and its memory, of which it keeps a little of every statement; the next segment opens it anew.

        A child that is forked between two segments has none; forks wait for one that is being written (forking.py).
        """
        db, self._db = self._db, None
        self._codes.clear()
        self._codes_of.clear()
        if db is not None:
            self._shared.leave(db)

    def _rows(self, kind: Kind, columns: dict[str, Array]) -> None:
        picks = []
        for name, sql_type in KEYS[kind].items():
            if name in ("rank", "attempt"):
                source = str(self._rank if name == "rank" else self._attempt)
            elif name == "value":
                source = "CASE WHEN isnan(value) THEN NULL ELSE value END"
            elif name == "site":
                source = "nullif(site, '')"
            else:
                source = name
            picks.append(f"CAST({source} AS {sql_type}) AS {name}")
        self._write(kind, f"SELECT {', '.join(picks)} FROM rows", [("rows", columns)])

    def _group(self, batches: Sequence[Batch], table: str) -> tuple[tuple[str, dict[str, Array]], str]:
        """Batches of one layout as a table of [R] arrays, and the SELECT that names its columns."""
        codes = [self._site_codes(batch.sites) for batch in batches]
        arrays: dict[str, Array] = {
            "site": np.concatenate(codes),
            "step": np.repeat([batch.step for batch in batches], [len(code) for code in codes]),
        }
        picks = [f"step, {self._rank}::INTEGER AS rank, {self._attempt}::INTEGER AS attempt, sites.name AS site"]
        for number, (name, dtype, bins, masked) in enumerate(batches[0].layout):
            column = f"c{number}"
            values, valid = _joined([batch.columns[name] for batch in batches], masked)
            if valid is not None:
                arrays[f"{column}_valid"] = valid
            if bins:
                # One array per bin, gathered into a list by DuckDB: no Python object per row.
                places = [f"{column}_{place}" for place in range(bins[0])]
                arrays |= {place: values[:, number] for number, place in enumerate(places)}
                source = f"[{', '.join(places)}]"
            else:
                arrays[column] = values
                # DuckDB takes a NaN in a numpy array for NULL already; the files must not depend on that.
                source = f"CASE WHEN isnan({column}) THEN NULL ELSE {column} END" if dtype[1] == "f" else column
                if len(self._mixed[name]) > 1:
                    source = f"CAST({source} AS DOUBLE)"  # a float32 could not hold the integers of other segments
            if valid is not None:
                source = f"CASE WHEN {column}_valid THEN {source} END"
            picks.append(f"{source} AS {quoted(name)}")
        return (
            table,
            arrays,
        ), f"SELECT {', '.join(picks)} FROM {table} JOIN sites ON sites.code = {table}.site"

    def _site_codes(self, sites: tuple[str, ...]) -> Array:
        """The integer codes [S] of site names; names seen for the first time get the next free ones."""
        known = self._codes_of.get(sites)
        if known is None:
            new = [site for site in dict.fromkeys(sites) if site not in self._codes]
            if new:
                self._codes |= {site: len(self._codes) + place for place, site in enumerate(new)}
                rows = {"code": np.array([self._codes[site] for site in new]), "name": np.array(new, object)}
                self.db.register("fresh", rows)
                self.db.execute("INSERT INTO sites SELECT code, name FROM fresh")
                self.db.unregister("fresh")
            known = np.array([self._codes[site] for site in sites], np.int32)
            if len(self._codes_of) > 64:  # models whose set of active sites changes at every step
                self._codes_of.clear()
            self._codes_of[sites] = known
        return known

    def _write(self, kind: Kind, select: str, tables: Sequence[tuple[str, dict[str, Array]]]) -> None:
        index = self._next[kind]
        target = self._folder / kind / str(Segment(self._rank, index, index))
        for table, columns in tables:
            self.db.register(table, columns)
        try:
            copy_aside(self.db, f"SELECT * FROM ({select}) ORDER BY {SORTED_BY[kind]}", target)
        finally:
            for table, _ in tables:
                self.db.unregister(table)
        self._next[kind] = index + 1
        self.written.append((kind, index))


def copy_aside(db: duckdb.DuckDBPyConnection, select: str, target: Path, row_group: int = ROW_GROUP) -> None:
    """Write a query's result as Parquet so that `target` appears whole and durable, or not at all."""
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(exist_ok=True)
        db.execute(f"COPY ({select}) TO {literal(aside)} ({PARQUET}, ROW_GROUP_SIZE {row_group})")
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
