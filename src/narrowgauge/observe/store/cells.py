"""The cells of a heatmap: one metric of all sites over steps, or over bins of steps, as one query.

Legend: S = sites, C = cells.
"""

from __future__ import annotations

from typing import Any

import duckdb
import numpy.typing as npt

from narrowgauge.observe.store.downsample import bin_width
from narrowgauge.observe.store.schema import HEATMAP_STEPS, role_of
from narrowgauge.observe.store.segments import quoted
from narrowgauge.observe.store.source import Source, parquet
from narrowgauge.observe.store.table import plain_column

Array = npt.NDArray[Any]


def cells(
    db: duckdb.DuckDBPyConnection, source: Source, metric: str, *, role: str | None, rank: int | None, max_steps: int
) -> tuple[tuple[str, ...], dict[str, Array]]:
    """Sites [S], and of each cell [C] its site's place, its (first) step, minimum, maximum and mean.

    For use within `source.ask`. Where a closed run's roll-ups show what is asked, they are read, not its rows.
    """
    if rank is None and len(ranks := source.tensor_ranks()) == 1:
        rank = ranks[0]
    rollup = source.rollup(rank) if rank is not None and max_steps == HEATMAP_STEPS else []
    if rollup:
        low, high, mean = (quoted(f"{each}:{metric}") for each in ("min", "max", "mean"))
        picks = f"site, step, {low}::DOUBLE AS low, {high}::DOUBLE AS high, {mean} AS mean"
        query = f"SELECT {picks} FROM {parquet(rollup)} WHERE {low} IS NOT NULL"
    else:
        rows, value = "tensors" if rank is None else source.tensors_of(rank), quoted(metric)
        span = db.execute(f"SELECT min(step), max(step) FROM {rows}").fetchone()
        first, last = span if span and span[0] is not None else (0, 0)
        picks = f"min({value})::DOUBLE AS low, max({value})::DOUBLE AS high, avg({value}) AS mean"
        bin_start = f"step - (step - {first}) % {bin_width(first, last, max_steps)}"
        query = f"SELECT site, {bin_start} AS step, {picks} FROM {rows} WHERE {value} IS NOT NULL GROUP BY ALL"
    db.execute(f"CREATE OR REPLACE TEMP TABLE cells AS {query}")
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
