"""open_run: a run folder as numpy arrays, through DuckDB over its Parquet segments.

    run.series(site, metric)   -> steps [T], values [T]
    run.heatmap(metric, role)  -> sites [S], steps [T], values [S, T]
    run.sql("SELECT ...")      over the views tensors, scalars, events

Opening reads run.json alone; every question looks at the folder anew, so a run can be followed while it is
written. How it ended is asked of all ranks (ends.py). Numbers come back exactly as they were recorded.

Legend: S = sites, T = steps (or bins of steps), B = bins of a histogram.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np
import numpy.typing as npt

from narrowgauge.errors import RunError, nearest
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.downsample import bin_width, extreme, keep_extrema
from narrowgauge.observe.store.ends import Ends
from narrowgauge.observe.store.ends import Reader as EndsReader
from narrowgauge.observe.store.schema import HEATMAP_STEPS, KINDS, role_of
from narrowgauge.observe.store.segments import quoted
from narrowgauge.observe.store.source import Source, parquet, segments_in
from narrowgauge.observe.store.table import Table, plain_column

Array = npt.NDArray[Any]
Keep = Literal["extreme", "min", "max", "mean"]


def open_run(path: str | os.PathLike[str], *, skip_corrupt: bool = False, recover: bool = False) -> Run:
    """Open a run folder for reading; a run that is still being written, or was killed, can be opened too.

    Where rank 0's part is missing, the others' are opened, with a warning that says whose they are.

    Arguments: `skip_corrupt`, go on without segments that cannot be read, with a warning that names them;
    `recover`, read the segments of a folder whose run.json is missing or damaged.
    Errors: RunError if the folder is missing, is not a run, or needs a newer narrowgauge.
    """
    folder = Path(path)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise RunError(f"{folder} {found}; expected the folder of a run (the one that holds run.json).")
    manifest = manifests.unknown() if recover else _manifest(folder)
    run = Run(folder, manifest, Source(folder, skip_corrupt=skip_corrupt))
    if run.rank:
        warnings.warn(f"{folder}: {run.ends.words}.", stacklevel=2)
    return run


def _manifest(folder: Path) -> manifests.Manifest:
    try:
        return manifests.read(folder)
    except FileNotFoundError:
        pass
    wrote = {segment.rank for kind in KINDS for segment in segments_in(folder / kind)}
    for rank in manifests.ranks(folder)[:1]:
        if rank <= min(wrote, default=rank):  # else there was a run.json
            return manifests.read(folder, rank)
    if any(segments_in(folder / kind) for kind in KINDS):
        raise RunError(
            f"{folder} holds recorded segments but no run.json: it was deleted or not copied. Copy it back, "
            f"or read the numbers without it by open_run({str(folder)!r}, recover=True)."
        )
    inside = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and manifests.ranks(entry))
    if inside:
        raise RunError(f"{folder} is not a run but holds runs: {', '.join(inside)}. Open one of those.")
    what = "is empty" if not any(folder.iterdir()) else "holds no run.json"
    raise RunError(f"{folder} {what}, so it is not a run. Expected the folder of a run that was recorded.")


class Run:
    """A recorded run; made by `open_run`. Nothing but run.json is read before it is asked for."""

    def __init__(self, path: Path, manifest: manifests.Manifest, source: Source) -> None:
        self.path = path
        self.manifest = manifest
        self._source = source
        self._ends = EndsReader(path, manifest)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status})"

    @property
    def rank(self) -> int:
        """The rank whose numbers stand for the run: 0, or if its part is missing the lowest that there is."""
        return int(self.manifest.get("rank", 0))

    @property
    def meta(self) -> dict[str, Any]:
        """The facts that the writer was given, as run.json had them when the run was opened."""
        return dict(self.manifest.get("meta", {}))

    @property
    def status(self) -> str:
        """How it ended: "complete", "failed", "stopped" (see `reason`), "killed"; or "running", "silent" (on
        another host, without a sign of life for a minute), "unknown".

        Of several ranks: "running" while any of them writes, else the worst; see `ends`.
        """
        return self.ends.status

    @property
    def ends(self) -> Ends:
        """How each rank ended, by the ranks' manifests as they are now; `ends.words` names those that did not."""
        return self._ends.read()

    @property
    def reason(self) -> str:
        """Why a stopped run's watch had to end early; otherwise ""."""
        return str(self.manifest.get("reason", ""))

    @property
    def lost(self) -> dict[str, int]:
        """Rows that were dropped because the disk was too slow or full, by kind."""
        return dict(self.manifest.get("lost", {}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that recorded something, ascending."""
        return tuple(sorted({segment.rank for kind in KINDS for segment in segments_in(self.path / kind)}))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metric columns of `tensors`, in the order in which they were first recorded."""
        return self._source.ask(lambda _: self._source.metrics)

    @property
    def sites(self) -> tuple[str, ...]:
        """Every site that was recorded, sorted."""
        return tuple(row[0] for row in self._rows("SELECT DISTINCT site FROM tensors ORDER BY site"))

    @property
    def steps(self) -> Array:
        """The steps that have tensor rows or scalars, ascending, int64 [T]."""
        return self._columns("SELECT step FROM tensors UNION SELECT step FROM scalars ORDER BY step")["step"]

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars that were recorded, sorted."""
        return tuple(row[0] for row in self._rows("SELECT DISTINCT name FROM scalars ORDER BY name"))

    def tensors(
        self,
        columns: Sequence[str] | str | None = None,
        sites: Sequence[str] | str | None = None,
        steps: Sequence[int] | int | None = None,
    ) -> Table:
        """Rows of per-site statistics, sorted by (site, step): keys `step`, `rank`, `site`, then the columns.

        `columns`, `sites` and `steps` restrict what is read: several, or one; None means all. Histograms are object
        columns of arrays [B], None where there is none. Errors: RunError for an unknown column.
        """
        columns, sites = ([one] if isinstance(one, str) else one for one in (columns, sites))
        steps = [steps] if isinstance(steps, int) else steps
        wanted = self.metrics if columns is None else self._known(columns)
        picks = ", ".join(["step", "rank", "site", *(quoted(name) for name in wanted)])
        where: list[str] = ["true"]
        parameters: list[Any] = []
        if sites is not None:
            where.append("site IN (SELECT unnest(?::VARCHAR[]))")
            parameters.append(list(sites))
        if steps is not None:
            where.append("step IN (SELECT unnest(?::BIGINT[]))")
            parameters.append([int(step) for step in steps])
        query = f"SELECT {picks} FROM tensors WHERE {' AND '.join(where)} ORDER BY site, step, rank"
        return Table(self._columns(query, parameters))

    def scalars(self, name: str | None = None, *, rank: int | None = None) -> Table:
        """Numbers of whole steps, one row per step: `step`, then a column per name (NaN where it has none).

        With `name`: only `step` and that column, only the steps that have it; no rows if it was never
        recorded. `rank`: whose rows; `Run.rank`'s by default.
        """
        names = self.scalar_names if name is None else (name,)
        picks = "".join(f", arg_max(value, wall_time) FILTER (name = ?) AS {quoted(each)}" for each in names)
        which = [] if name is None else [name]
        only = "AND name = ? " if which else ""
        query = f"SELECT step{picks} FROM scalars WHERE rank = ? {only}GROUP BY step ORDER BY step"
        return Table(self._columns(query, [*names, self.rank if rank is None else rank, *which]))

    def events(self, kind: str | None = None) -> Table:
        """What happened: `step`, `rank`, `kind`, `site` (or None), `message`, `data` (JSON), `wall_time`."""
        only, which = ("", []) if kind is None else ("WHERE kind = ? ", [kind])
        picks = "step, rank, kind, site, message, data, wall_time"
        return Table(self._columns(f"SELECT {picks} FROM events {only}ORDER BY step, wall_time", which))

    def series(
        self, site: str, metric: str, *, rank: int | None = None, max_points: int | None = None
    ) -> tuple[Array, Array]:
        """One metric of one site over time: steps int64 [T], values float64 [T] (histograms: [T, B]).

        Steps without a value are left out. `max_points` thins the series to about that many points and keeps
        the lowest and highest of every stretch; `rank` is as in `scalars`. Errors: RunError for an unknown metric
        or site.
        """
        (name,) = self._known([metric])
        value = quoted(name)
        found = self._fetched(
            lambda db: db.execute(
                f"SELECT step, {value} AS value FROM {self._source.tensors_of(self.rank if rank is None else rank)} "
                f"WHERE site = ? AND {value} IS NOT NULL ORDER BY step",
                [site],
            )
        )
        steps, values = found["step"], found["value"]
        if not len(steps) and site not in self.sites:
            raise RunError(f"{self.path} has no site {site!r}: {_nearest(site, self.sites)}")
        if values.dtype == object and len(values):
            return steps, np.stack(list(values)).astype(np.float64)
        values = values.astype(np.float64)
        return (steps, values) if max_points is None else keep_extrema(steps, values, max_points)

    def heatmap(
        self,
        metric: str,
        role: str | None = None,
        *,
        rank: int | None = None,
        max_steps: int = HEATMAP_STEPS,
        keep: Keep = "extreme",
    ) -> tuple[tuple[str, ...], Array, Array]:
        """One metric of all sites over time: sites (S), steps int64 [T], values float64 [S, T] with NaN.

        Only sites that have the metric; of all ranks, unless one is named. A run that spans more than
        `max_steps` steps is binned: `steps` are then the first steps of the bins, and a cell is its bin's
        minimum, maximum or mean, or ("extreme") whichever of minimum and maximum lies farther from what is
        usual at that site. Where ranks wrote rows of their own, a cell is of all their rows. Errors: RunError
        for an unknown metric or a histogram.
        """
        (name,) = self._known([metric])
        if name in self._source.histograms:
            raise RunError(f"{name!r} is a histogram, which a heatmap can't show; read it by series(site, {name!r}).")
        sites, found = self._source.ask(lambda db: self._cells(db, name, role, rank, max_steps))
        steps, columns = np.unique(found["step"], return_inverse=True)
        low_ST, high_ST, mean_ST = (np.full((len(sites), len(steps)), np.nan) for _ in range(3))
        for values_ST, key in ((low_ST, "low"), (high_ST, "high"), (mean_ST, "mean")):
            values_ST[found["place"], columns] = found[key]
        pick = {"min": low_ST, "max": high_ST, "mean": mean_ST}
        return sites, steps, pick[keep] if keep in pick else extreme(low_ST, high_ST, mean_ST)

    def sql(self, query: str, parameters: Sequence[Any] | None = None) -> Table:
        """Any DuckDB query over the views `tensors`, `scalars` and `events`. Errors: RunError."""
        return Table(self._columns(query, parameters))

    def _cells(
        self, db: duckdb.DuckDBPyConnection, metric: str, role: str | None, rank: int | None, max_steps: int
    ) -> tuple[tuple[str, ...], dict[str, Array]]:
        """The sites of a heatmap, and per cell its site's place, its (first) step, minimum, maximum and mean."""
        if rank is None and len(ranks := self._source.tensor_ranks()) == 1:
            rank = ranks[0]
        rollup = self._source.rollup(rank) if rank is not None and max_steps == HEATMAP_STEPS else []
        if rollup:
            low, high, mean = (quoted(f"{each}:{metric}") for each in ("min", "max", "mean"))
            picks = f"site, step, {low}::DOUBLE AS low, {high}::DOUBLE AS high, {mean} AS mean"
            cells = f"SELECT {picks} FROM {parquet(rollup)} WHERE {low} IS NOT NULL"
        else:
            rows, value = "tensors" if rank is None else self._source.tensors_of(rank), quoted(metric)
            span = db.execute(f"SELECT min(step), max(step) FROM {rows}").fetchone()
            first, last = span if span and span[0] is not None else (0, 0)
            picks = f"min({value})::DOUBLE AS low, max({value})::DOUBLE AS high, avg({value}) AS mean"
            bin_start = f"step - (step - {first}) % {bin_width(first, last, max_steps)}"
            cells = f"SELECT site, {bin_start} AS step, {picks} FROM {rows} WHERE {value} IS NOT NULL GROUP BY ALL"
        db.execute(f"CREATE OR REPLACE TEMP TABLE cells AS {cells}")
        found = db.execute("SELECT DISTINCT site FROM cells ORDER BY site").fetchall()
        sites = tuple(site for (site,) in found if role is None or role_of(site) == role)
        # Sites travel as numbers: a Python string per cell would cost more than the query.
        fetched = db.execute(
            "WITH wanted AS (SELECT unnest(?::VARCHAR[]) AS site, unnest(range(?)) AS place) "
            "SELECT place, step, low, high, mean FROM cells JOIN wanted USING (site)",
            [list(sites), len(sites)],
        ).fetchnumpy()
        db.execute("DROP TABLE cells")
        return sites, {name: plain_column(values) for name, values in fetched.items()}

    def _known(self, names: Iterable[str]) -> list[str]:
        metrics = self.metrics
        for name in names:
            if name not in metrics:
                raise RunError(f"{self.path} has no metric {name!r}: {_nearest(name, metrics)}")
        return list(names)

    def _rows(self, query: str, parameters: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        given = list(parameters)
        return self._source.ask(lambda db: db.execute(query, given).fetchall())

    def _columns(self, query: str, parameters: Iterable[Any] | None = None) -> dict[str, Array]:
        given = list(parameters or ())
        return self._fetched(lambda db: db.execute(query, given))

    def _fetched(self, query: Callable[[duckdb.DuckDBPyConnection], duckdb.DuckDBPyConnection]) -> dict[str, Array]:
        fetched = self._source.ask(lambda db: query(db).fetchnumpy())
        return {name: plain_column(values) for name, values in fetched.items()}


def _nearest(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name; a run may have thousands, so not all of them."""
    if not known:
        return "nothing was recorded."
    said = nearest(name, known)
    return said if len(said) < 400 else f"there is: {', '.join(sorted(known)[:5])} and {len(known) - 5} more."
