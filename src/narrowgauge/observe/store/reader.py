"""open_run: a run folder as numpy arrays, through DuckDB over its Parquet segments.

    run.scalars(name)          -> a table: step, name
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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from narrowgauge.errors import RunError, UsageError
from narrowgauge.metrics.site import ROLES
from narrowgauge.observe.store import asked
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.cells import cells
from narrowgauge.observe.store.downsample import extreme, keep_extrema
from narrowgauge.observe.store.ends import Ends
from narrowgauge.observe.store.ends import Reader as EndsReader
from narrowgauge.observe.store.schema import HEATMAP_STEPS, KINDS, role_of
from narrowgauge.observe.store.segments import quoted
from narrowgauge.observe.store.source import QUERY, Source, segments_in
from narrowgauge.observe.store.table import Table

Array = npt.NDArray[Any]
Keep = Literal["extreme", "min", "max", "mean"]
SITE = "layers.0.mlp.up:input"  # as messages show one


def open_run(path: str | os.PathLike[str], *, skip_corrupt: bool = False, recover: bool = False) -> Run:
    """Open a run folder for reading; a run that is still being written, or was killed, can be opened too.

    Where rank 0's part is missing, the others' are opened, with a warning that says whose they are.

    Arguments: `skip_corrupt`, go on without segments that cannot be read, with a warning that names them;
    `recover`, read the segments of a folder even if its run.json is missing or damaged.
    Errors: RunError if the folder is missing, is not a run, or needs a newer narrowgauge; UsageError for no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"open_run takes the path of one run's folder; found {type(path).__name__}.")
    folder = Path(path)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise RunError(f"{folder} {found}; expected the folder of a run (the one that holds run.json).")
    try:
        manifest = _manifest(folder)
    except RunError:
        if not recover:
            raise
        manifest = manifests.unknown()
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
    """A recorded run; made by `open_run`. Nothing but run.json is read before it is asked for.

    Errors of all that is asked: RunError for what the run does not have, or what cannot be read; UsageError for an
    argument of a wrong kind.
    """

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

    @cached_property
    def metas(self) -> dict[int, dict[str, Any]]:
        """The facts of every rank, ascending, as they were when first asked for; `meta` is `rank`'s.

        What cannot be read is left out, and so is what an earlier attempt with more ranks has left.
        """
        found = {self.rank: self.manifest}
        for rank in manifests.ranks(self.path):
            with suppress(OSError, RunError):
                found.setdefault(rank, manifests.read(self.path, rank))
        attempt = self.manifest.get("attempt", 0)
        newest = {rank: each for rank, each in sorted(found.items()) if each.get("attempt", 0) >= attempt}
        return {rank: dict(each.get("meta") or {}) for rank, each in newest.items()}

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
        return tuple(row[0] for row in self._source.rows("SELECT DISTINCT site FROM tensors ORDER BY site"))

    @property
    def steps(self) -> Array:
        """The steps that have tensor rows or scalars, ascending, int64 [T]."""
        return self._source.columns("SELECT step FROM tensors UNION SELECT step FROM scalars ORDER BY step")["step"]

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars that were recorded, sorted."""
        return tuple(row[0] for row in self._source.rows("SELECT DISTINCT name FROM scalars ORDER BY name"))

    def tensors(
        self,
        columns: Iterable[str] | None = None,
        sites: Iterable[str] | None = None,
        steps: Iterable[int] | int | None = None,
    ) -> Table:
        """Rows of per-site statistics, sorted by (site, step): keys `step`, `rank`, `site`, then the columns.

        `columns`, `sites` and `steps` restrict what is read: several, or one; None means all. Steps that were not
        recorded have no rows. Histograms are object columns of arrays [B], None where there is none.
        """
        wanted = self.metrics if columns is None else self._known(asked.names("columns", columns, "amax"))
        picks = ", ".join(["step", "rank", "site", *(quoted(name) for name in wanted)])
        where: list[str] = ["true"]
        parameters: list[Any] = []
        only = None if sites is None else asked.names("sites", sites, SITE)
        if only is not None:
            where.append("site IN (SELECT unnest(?::VARCHAR[]))")
            parameters.append(only)
        if steps is not None:
            where.append("step IN (SELECT unnest(?::BIGINT[]))")
            parameters.append(asked.wholes("steps", steps))
        query = f"SELECT {picks} FROM tensors WHERE {' AND '.join(where)} ORDER BY site, step, rank"
        table = Table(self._source.columns(query, parameters))
        if only is not None:
            self._there("site", set(only).difference(table["site"]), lambda: self.sites)
        return table

    def scalars(self, name: Iterable[str] | None = None, *, rank: int | None = None) -> Table:
        """Numbers of whole steps, one row per step: `step`, then a column per name (NaN where it has none).

        With a `name`, or several: only `step` and these columns, only the steps that have any of them. `rank`: whose
        rows; `Run.rank`'s by default. Which there are, `scalar_names` says; before any was recorded, all are empty.
        """
        names = list(self.scalar_names) if name is None else asked.names("name", name, "loss")
        whose, which = self._rank(rank), [] if name is None else [names]
        # Columns go by number: DuckDB takes names that differ only in case for one. And it passes over NULLs, our NaNs.
        value = "coalesce(value, 'nan'::DOUBLE)"
        picks = "".join(f', arg_max({value}, wall_time) FILTER (name = ?) AS "{at}"' for at in range(len(names)))
        only = "AND name IN (SELECT unnest(?::VARCHAR[])) " if which else ""
        query = f"SELECT step{picks} FROM scalars WHERE rank = ? {only}GROUP BY step ORDER BY step"
        found = self._source.columns(query, [*names, whose, *which])
        values = {each: found[str(at)] for at, each in enumerate(names)}
        if which:
            empty = [each for each in names if np.isnan(values[each].astype(np.float64)).all()]
            self._there("scalar", empty, lambda: self.scalar_names)
        return Table({"step": found["step"], **values})

    def events(self, kind: Iterable[str] | None = None) -> Table:
        """What happened: `step`, `rank`, `kind`, `site` (or None), `message`, `data` (JSON), `wall_time`.

        With a `kind`, or several: only these; no rows of what never happened.
        """
        kinds = None if kind is None else asked.names("kind", kind, "nan")
        only, which = ("", []) if kinds is None else ("WHERE kind IN (SELECT unnest(?::VARCHAR[])) ", [kinds])
        picks = "step, rank, kind, site, message, data, wall_time"
        return Table(self._source.columns(f"SELECT {picks} FROM events {only}ORDER BY step, wall_time", which))

    def series(
        self, site: str, metric: str, *, rank: int | None = None, max_points: int | None = None
    ) -> tuple[Array, Array]:
        """One metric of one site over time: steps int64 [T], values float64 [T] (histograms: [T, B]).

        Steps without a value are left out. `max_points` thins the series to about that many points and keeps
        the lowest and highest of every stretch; `rank` is as in `scalars`.
        """
        site = asked.name("site", site, SITE)
        most = None if max_points is None else asked.whole("max_points", max_points, least=1)
        whose = self._rank(rank)
        value = quoted(self._metric(metric))
        found = self._source.columns(
            lambda: (
                f"SELECT step, {value} AS value FROM {self._source.tensors_of(whose)} "
                f"WHERE site = ? AND {value} IS NOT NULL ORDER BY step"
            ),
            [site],
        )
        steps, values = found["step"], found["value"]
        self._there("site", () if len(steps) else {site}, lambda: self.sites)
        if values.dtype == object and len(values):
            return steps, np.stack(list(values)).astype(np.float64)
        values = values.astype(np.float64)
        return (steps, values) if most is None else keep_extrema(steps, values, most)

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

        Only sites that have the metric, and the role, if one is named; of all ranks, unless one is. A run that spans
        more than `max_steps` steps is binned: `steps` are then the first steps of the bins, and a cell is its bin's
        minimum, maximum or mean, or ("extreme") whichever of minimum and maximum lies farther from what is
        usual at that site. Where ranks wrote rows of their own, a cell is of all their rows. A histogram has no
        heatmap: RunError.
        """
        name = self._metric(metric)
        if name in self._source.histograms:
            raise RunError(f"{name!r} is a histogram, which a heatmap can't show; read it by series(site, {name!r}).")
        asked.one_of("keep", keep, get_args(Keep))
        of = None if role is None else asked.name("role", role, ROLES[0])
        whose = None if rank is None else self._rank(rank)
        most = asked.whole("max_steps", max_steps, least=1)
        sites, found = self._source.ask(lambda db: cells(db, self._source, name, role=of, rank=whose, max_steps=most))
        if of is not None and not sites:
            self._there("role", {of}, lambda: {*ROLES, *map(role_of, self.sites)} - {""})
        steps, columns = np.unique(found["step"], return_inverse=True)
        low_ST, high_ST, mean_ST = (np.full((len(sites), len(steps)), np.nan) for _ in range(3))
        for values_ST, key in ((low_ST, "low"), (high_ST, "high"), (mean_ST, "mean")):
            values_ST[found["place"], columns] = found[key]
        pick = {"min": low_ST, "max": high_ST, "mean": mean_ST}
        return sites, steps, pick[keep] if keep in pick else extreme(low_ST, high_ST, mean_ST)

    def sql(self, query: str, parameters: Iterable[Any] | Mapping[str, Any] | None = None) -> Table:
        """Any DuckDB query over the views `tensors`, `scalars` and `events`.

        A row of `scalars` is one number: `step`, `rank`, `name`, `value`.
        `parameters`: values for each `?` of it, or a dict for its `$names`.
        """
        if not isinstance(query, str):
            raise asked.wrong("query", query, QUERY)
        return Table(self._source.columns(query, asked.values(parameters)))

    def _known(self, names: list[str]) -> list[str]:
        metrics = self.metrics
        for name in names:
            if name not in metrics:
                raise asked.unknown(self.path, "metric", name, metrics)
        return names

    def _metric(self, given: Any) -> str:
        return self._known([asked.name("metric", given, "amax")])[0]

    def _rank(self, given: Any) -> int:
        """The rank that is meant: the one that stands for the run, or one that recorded something."""
        if given is None:
            return self.rank
        rank, ranks = asked.whole("rank", given), self.ranks
        self._there("rank", () if rank in ranks else {rank}, lambda: ranks)
        return rank

    def _there(self, what: str, missed: Iterable[Any], known: Callable[[], Iterable[Any]]) -> None:
        """Complain of the first that was missed and is not `known`, which is asked only if any was.

        A run that has recorded none yet may still come to it: whoever follows it finds no rows.
        """
        if missed := list(missed):
            there = set(known())
            for each in missed:
                if there and each not in there:
                    raise asked.unknown(self.path, what, each, there)
