"""Roll-ups: the long run in a thousand bins, so that a heatmap need not read every step.

    bin of step s = (s - s_min) // width          per site, bin and metric: min, max, mean, count

Minimum and maximum keep every spike; the count lets means be merged. A roll-up file bears the name of the segment
that it was made from, so a reader can tell whether it speaks of all the rows there are.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from narrowgauge.observe.store.downsample import bin_width
from narrowgauge.observe.store.schema import HEATMAP_STEPS, KEYS, ROLLUPS, Segment
from narrowgauge.observe.store.segments import copy_aside, quoted
from narrowgauge.observe.store.source import parquet, segments_in

ROLLUP_FROM = 16  # steps per bin: with fewer, reading the rows is quick and a roll-up hardly smaller


def roll_up(db: duckdb.DuckDBPyConnection, folder: Path, segments: list[Segment]) -> None:
    """Bring one rank's roll-ups up to date with its tensor segments, one file for each.

    There are none for a short run, nor for a resumed one, whose segments hold rows that no longer count.
    """
    files = [folder / "tensors" / str(segment) for segment in segments]
    span = db.execute(f"SELECT min(step), max(step), max(attempt) FROM {parquet(files)}").fetchone()
    first, last, attempts = span or (0, 0, 0)
    width = bin_width(first, last, HEATMAP_STEPS)
    wanted = width >= ROLLUP_FROM and attempts == 0
    present = [rollup for rollup in segments_in(folder / ROLLUPS) if rollup.rank == segments[0].rank]
    for rollup in present:
        if not wanted or rollup not in segments:
            (folder / ROLLUPS / str(rollup)).unlink(missing_ok=True)
    if not wanted or set(segments) <= set(present):
        return
    picks = ["site", f"step - (step - {first}) % {width} AS step"]
    for name, sql_type in _columns(db, files):
        if name in KEYS["tensors"] or sql_type.endswith("[]"):
            continue
        for function, label in (("min", "min"), ("max", "max"), ("avg", "mean"), ("count", "count")):
            picks.append(f"{function}({quoted(name)}) AS {quoted(f'{label}:{name}')}")
    for segment, file in zip(segments, files, strict=True):
        rows = f"SELECT {', '.join(picks)} FROM {parquet([file])} GROUP BY ALL ORDER BY site, 2"
        copy_aside(db, rows, folder / ROLLUPS / str(segment))


def _columns(db: duckdb.DuckDBPyConnection, files: list[Path]) -> list[tuple[str, str]]:
    """Names and SQL types of the columns of all files together."""
    return [column[:2] for column in db.execute(f"DESCRIBE SELECT * FROM {parquet(files)}").fetchall()]
