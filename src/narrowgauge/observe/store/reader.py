"""open_run: a run folder as numpy arrays, through DuckDB over its Parquet segments.

    run.series(site, metric)   -> steps [T], values [T]
    run.heatmap(metric, role)  -> sites [S], steps [T], values [S, T]
    run.sql("SELECT ...")      over the views tensors, scalars, events

Opening reads run.json alone; every query looks at the folder anew, so a run can be followed while it is written. Numbers come back exactly
as they were recorded.

Legend: S = sites, T = steps (or bins of steps), B = bins of a histogram.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import numpy as np
import numpy.typing as npt

from narrowgauge.errors import RunError, nearest
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.schema import KEYS, KINDS, Kind, Segment, live, role_of
from narrowgauge.observe.store.segments import literal, quoted
from narrowgauge.observe.store.table import Table, plain_column

Array = npt.NDArray[Any]
Result = TypeVar("Result")


def open_run(path: str | os.PathLike[str], *, skip_corrupt: bool = False, recover: bool = False) -> Run:
    """Open a run folder for reading; a run that is still being written, or was killed, can be opened too.

    Arguments: `skip_corrupt`, go on without segments that cannot be read, with a warning that names them; `recover`,
    read the segments of a folder whose run.json is missing or damaged.
    Errors: RunError if the folder is missing, is not a run, or needs a newer narrowgauge.
    """
    folder = Path(path)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise RunError(f"{folder} {found}; expected the folder of a run (the one that holds run.json).")
    if recover:
        manifest = {**manifests.fresh(0, {}), "status": "unknown", "started": None, "process": {}}
    else:
        manifest = _manifest(folder)
    return Run(folder, manifest, skip_corrupt=skip_corrupt)


def _manifest(folder: Path) -> manifests.Manifest:
    try:
        return manifests.read(folder)
    except FileNotFoundError:
        pass
    if any(_segments(folder, kind) for kind in KINDS):
        raise RunError(
            f"{folder} holds recorded segments but no run.json: it was deleted or not copied. Copy it back, or read the "
            f"numbers without it by open_run({str(folder)!r}, recover=True)."
        )
    inside = sorted(entry.name for entry in folder.iterdir() if (entry / "run.json").is_file())
    if inside:
        raise RunError(f"{folder} is not a run but holds runs: {', '.join(inside)}. Open one of those.")
    what = "is empty" if not any(folder.iterdir()) else "holds no run.json"
    raise RunError(f"{folder} {what}, so it is not a run. Expected the folder that `narrowgauge run --out` wrote.")


def _segments(folder: Path, kind: Kind) -> list[Segment]:
    directory = folder / kind
    entries = os.listdir(directory) if directory.is_dir() else []
    return live(segment for segment in map(Segment.parse, entries) if segment is not None)


class Run:
    """A recorded run; made by `open_run`. Nothing is read before it is asked for."""

    def __init__(self, path: Path, manifest: manifests.Manifest, *, skip_corrupt: bool = False) -> None:
        self.path = path
        self.manifest = manifest
        self._skip_corrupt = skip_corrupt
        self._db = duckdb.connect()
        self._viewed: dict[Kind, list[Segment] | None] = dict.fromkeys(KINDS)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status})"

    @property
    def meta(self) -> dict[str, Any]:
        """The facts that the writer was given."""
        return dict(self.manifest.get("meta", {}))

    @property
    def status(self) -> str:
        """"running", "complete", "failed", "stopped" (the watch had to end early: see `reason`) or "killed"."""
        return manifests.status(self.manifest)

    @property
    def reason(self) -> str:
        """Why a stopped run stopped; otherwise ""."""
        return str(self.manifest.get("reason", ""))

    @property
    def lost(self) -> dict[str, int]:
        """Rows that were dropped because the disk was too slow or full, by kind."""
        return dict(self.manifest.get("lost", {}))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metric columns of `tensors`, in the order in which they were first recorded."""
        names = [row[0] for row in self._rows("DESCRIBE tensors")]
        return tuple(name for name in names if name not in KEYS["tensors"])

    @property
    def sites(self) -> tuple[str, ...]:
        """Every site that was recorded, sorted."""
        return tuple(row[0] for row in self._rows("SELECT DISTINCT site FROM tensors ORDER BY site"))

    @property
    def steps(self) -> Array:
        """The steps that have tensor rows or scalars, ascending, int64 [T]."""
        query = "SELECT step FROM tensors UNION SELECT step FROM scalars ORDER BY step"
        return self._columns(query)["step"]

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars that were recorded, sorted."""
        return tuple(row[0] for row in self._rows("SELECT DISTINCT name FROM scalars ORDER BY name"))

    def tensors(
        self,
        columns: Sequence[str] | None = None,
        sites: Sequence[str] | None = None,
        steps: Sequence[int] | None = None,
    ) -> Table:
        """Rows of per-site statistics, sorted by (site, step): keys `step`, `rank`, `site` and the asked columns.

        `columns`, `sites` and `steps` restrict what is read; None means all. Histograms are object columns of arrays.
        Errors: RunError for an unknown column.
        """
        names = self.metrics if columns is None else [self._metric(name) for name in columns]
        picks = ", ".join(["step", "rank", "site", *(quoted(name) for name in names if name not in KEYS["tensors"])])
        where, parameters = ["true"], []
        if sites is not None:
            where.append("site IN (SELECT unnest(?::VARCHAR[]))")
            parameters.append(list(sites))
        if steps is not None:
            where.append("step IN (SELECT unnest(?::BIGINT[]))")
            parameters.append([int(step) for step in steps])
        query = f"SELECT {picks} FROM tensors WHERE {' AND '.join(where)} ORDER BY site, step, rank, attempt"
        return Table(self._columns(query, parameters))

    def scalars(self, name: str | None = None) -> Table:
        """Numbers of whole steps, one row per step: `step`, then a column per name (NaN where a step has none).

        With `name`: only `step` and that column, only the steps that have it; no rows if it was never recorded.
        """
        names = self.scalar_names if name is None else (name,)
        # Of a step that was recorded twice (a resumed run), the later recording counts.
        picks = "".join(f", arg_max(value, wall_time) FILTER (name = ?) AS {quoted(each)}" for each in names)
        query = f"SELECT step{picks} FROM scalars WHERE rank = 0 AND (name = ? OR ?) GROUP BY step ORDER BY step"
        return Table(self._columns(query, [*names, name or "", name is None]))

    def events(self, kind: str | None = None) -> Table:
        """What happened: `step`, `rank`, `kind`, `site` (or None), `message`, `data` (JSON text), `wall_time`."""
        query = (
            "SELECT step, rank, kind, site, message, data, wall_time FROM events WHERE kind = ? OR ? "
            "ORDER BY step, wall_time"
        )
        return Table(self._columns(query, [kind or "", kind is None]))

    def series(self, site: str, metric: str, *, rank: int = 0) -> tuple[Array, Array]:
        """One metric of one site over time: steps int64 [T] and values float64 [T] (histograms: object [T]).

        Steps without a value are left out. Errors: RunError for an unknown metric; an unknown site has no steps.
        """
        column = quoted(self._metric(metric))
        query = (
            f"SELECT step, {column} AS value FROM tensors WHERE site = ? AND rank = ? AND {column} IS NOT NULL "
            "ORDER BY step, attempt"
        )
        found = self._columns(query, [site, rank])
        steps, values = found["step"], found["value"]
        last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]  # a resumed run recorded some steps twice
        values = values[last]
        return steps[last], values if values.dtype == object else values.astype(np.float64)

    def heatmap(self, metric: str, role: str | None = None, *, rank: int = 0) -> tuple[tuple[str, ...], Array, Array]:
        """One metric of all sites over time: sites (S), steps int64 [T], values float64 [S, T], NaN where none."""
        column = quoted(self._metric(metric))
        sites = tuple(site for site in self.sites if role is None or role_of(site) == role)
        found = self._columns(
            f"SELECT site, step, {column} AS value FROM tensors WHERE rank = ? AND {column} IS NOT NULL "
            "AND site IN (SELECT unnest(?::VARCHAR[])) ORDER BY site, step, attempt",
            [rank, list(sites)],
        )
        steps, columns = np.unique(found["step"], return_inverse=True)
        row_of = {site: row for row, site in enumerate(sites)}
        values_ST = np.full((len(sites), len(steps)), np.nan)
        values_ST[[row_of[site] for site in found["site"]], columns] = found["value"]
        return sites, steps, values_ST

    def sql(self, query: str, parameters: Sequence[Any] | None = None) -> Table:
        """Any DuckDB query over the views `tensors`, `scalars` and `events`."""
        return Table(self._columns(query, parameters))

    def _metric(self, name: str) -> str:
        names = self.metrics
        if name not in names and name not in KEYS["tensors"]:
            raise RunError(f"{self.path} has no metric {name!r}: {nearest(name, names) if names else 'it has none.'}")
        return name

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._ask(lambda: self._db.execute(query).fetchall())

    def _columns(self, query: str, parameters: Iterable[Any] | None = None) -> dict[str, Array]:
        given = list(parameters or ())
        fetched = self._ask(lambda: self._db.execute(query, given).fetchnumpy())
        return {name: plain_column(values) for name, values in fetched.items()}

    def _ask(self, query: Callable[[], Result]) -> Result:
        self._refresh()
        return query()

    def _refresh(self) -> None:
        """Point the views at the segments that are there now."""
        for kind in KINDS:
            segments = _segments(self.path, kind)
            if segments == self._viewed[kind]:
                continue
            self._viewed[kind] = segments
            if segments:
                files = ", ".join(literal(self.path / kind / str(segment)) for segment in segments)
                source = f"SELECT * FROM read_parquet([{files}], union_by_name = true, hive_partitioning = false)"
            else:
                source = "SELECT " + ", ".join(f"NULL::{sql} AS {name}" for name, sql in KEYS[kind].items()) + " LIMIT 0"
            self._db.execute(f"CREATE OR REPLACE VIEW {kind} AS {source}")
