"""Fewer, larger segments and roll-ups, so that a long run stays quick to read.

    merge    segments first..last of one rank  ->  one file (or parts, cut by site), sorted by (site, step)

The merged file appears by one rename and its name says what it stands for; only then are its inputs
removed. A process killed anywhere in between leaves a readable run: files that a wider one contains are not
read.

Source of the tiers: log-structured merging (O'Neil et al., 1996), fan-in 16.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb

from narrowgauge.errors import RunError
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.database import connect
from narrowgauge.observe.store.rollup import roll_up
from narrowgauge.observe.store.schema import KINDS, ROLLUPS, SORTED_BY, Kind, Segment
from narrowgauge.observe.store.segments import COMPACTED_ROW_GROUP, copy_aside, literal
from narrowgauge.observe.store.source import parquet, segments_in

FAN_IN = 16
MERGE_BYTES = 32 << 20  # segments on disk that the writer still merges while training: sorting costs memory
PART_BYTES = 512 << 20  # uncompressed data that one part of a compacted span holds


@dataclass(frozen=True)
class Compaction:
    """What compacting a run did: files and bytes on disk before and after, and the rows they hold."""

    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    rows: int


def compact(path: str | os.PathLike[str], *, force: bool = False) -> Compaction:
    """Merge a finished run's segments per rank and kind, and build roll-ups for its heatmaps.

    Needs about the run's own size free on the disk while it works. `force` takes a run that says it is running, on
    a host where nobody can look, for a dead one. Errors: RunError if the run is still being written, cannot be read,
    or the disk is full; the run is then as readable as before.
    """
    folder = Path(path)
    for rank in [0, *_ranks(folder)]:
        _refuse_running(folder, rank, force)
    before = _sizes(folder)
    rows = 0
    try:
        with connect(folder / ".spill") as db:
            for kind in KINDS:
                segments = segments_in(folder / kind)
                for rank in sorted({segment.rank for segment in segments}):
                    mine = [segment for segment in segments if segment.rank == rank]
                    rows += _compact(db, folder, kind, mine)
    except (duckdb.Error, OSError) as error:
        cause = " ".join(str(error).split())
        raise RunError(f"compacting {folder} failed ({cause}). The run is as readable as before.") from error
    after = _sizes(folder)
    return Compaction(len(before), len(after), sum(before), sum(after), rows)


def merge_tier(db: duckdb.DuckDBPyConnection, folder: Path, kind: Kind, rank: int, written: int) -> None:
    """After segment `written`: merge the small segments of every tier (16, 256, ...) that it completes."""
    span = FAN_IN
    while (written + 1) % span == 0:
        directory = folder / kind
        inside = [
            segment
            for segment in segments_in(directory)
            if segment.rank == rank and segment.first > written - span and segment.parts == 1
        ]
        size = sum((directory / str(segment)).stat().st_size for segment in inside)
        if len(inside) < 2 or size > MERGE_BYTES:
            return
        target = Segment(rank, inside[0].first, inside[-1].last)
        rows = f"SELECT * FROM {parquet(directory / str(segment) for segment in inside)}"
        copy_aside(db, f"{rows} ORDER BY {SORTED_BY[kind]}", directory / str(target))
        _remove(directory, inside)
        span *= FAN_IN


def _compact(db: duckdb.DuckDBPyConnection, folder: Path, kind: Kind, segments: list[Segment]) -> int:
    """One rank's segments of one kind into as few parts as memory allows; the number of rows."""
    directory = folder / kind
    files = [directory / str(segment) for segment in segments]
    (rows,) = _one(db, f"SELECT count(*) FROM {parquet(files)}")
    done = len({(segment.first, segment.last) for segment in segments}) == 1
    if not done:
        cuts = _cuts(db, files) if kind == "tensors" else ["true"]
        rank, first, last = segments[0].rank, segments[0].first, segments[-1].last
        merged = [Segment(rank, first, last, part, len(cuts)) for part in range(len(cuts))]
        for segment, cut in zip(merged, cuts, strict=True):
            select = f"SELECT * FROM {parquet(files)} WHERE {cut} ORDER BY {SORTED_BY[kind]}"
            copy_aside(db, select, directory / str(segment), COMPACTED_ROW_GROUP)
        kept = [directory / str(segment) for segment in merged]
        (copied,) = _one(db, f"SELECT count(*) FROM {parquet(kept)}")
        if copied != rows:
            for file in kept:
                file.unlink()
            raise RunError(f"compacting {directory} would have kept {copied} of {rows} rows; nothing was changed.")
        _sweep(directory, merged)
        segments, files = merged, kept
    if kind == "tensors":
        roll_up(db, folder, segments)
    return int(rows)


def _cuts(db: duckdb.DuckDBPyConnection, files: list[Path]) -> list[str]:
    """Conditions on the site that cut the rows into parts of about PART_BYTES."""
    names = ", ".join(literal(file) for file in files)
    (size,) = _one(db, f"SELECT sum(total_uncompressed_size) FROM parquet_metadata([{names}])")
    sites = [row[0] for row in db.execute(f"SELECT DISTINCT site FROM {parquet(files)} ORDER BY 1").fetchall()]
    parts = min(len(sites), -(-int(size) // PART_BYTES)) or 1
    firsts = [sites[len(sites) * part // parts] for part in range(1, parts)]
    bounds: list[str | None] = [None, *firsts, None]
    cuts = []
    for low, high in pairwise(bounds):
        above = "true" if low is None else f"site >= {literal(low)}"
        cuts.append(above if high is None else f"{above} AND site < {literal(high)}")
    return cuts


def _refuse_running(folder: Path, rank: int, force: bool) -> None:
    try:
        manifest = manifests.read(folder, rank)
    except FileNotFoundError:
        if rank or manifests.ranks(folder):
            return
        raise RunError(f"{folder} holds no run.json, so it is not a run that could be compacted.") from None
    alive = manifests.is_alive(manifest) if manifest["status"] == "running" else False
    if alive or (alive is None and not force):
        where = "" if alive else " on another host, as far as one can tell from here (force=True if it was killed)"
        raise RunError(f"{folder} is still being written{where}. Compact it when its writer has closed it.")


def _ranks(folder: Path) -> list[int]:
    found = (segment.rank for kind in KINDS for segment in segments_in(folder / kind))
    return sorted(set(found) - {0})


def _sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for kind in (*KINDS, ROLLUPS) for file in (folder / kind).glob("rank*.parquet")]


def _sweep(directory: Path, merged: list[Segment]) -> None:
    """Remove what the merged parts stand for, and what an interrupted attempt left behind."""
    for entry in directory.iterdir():
        segment = Segment.parse(entry.name)
        replaced = segment is not None and segment not in merged and merged[0].contains(segment)
        if replaced or entry.name.startswith(f".rank{merged[0].rank}-"):
            entry.unlink()


def _remove(directory: Path, segments: list[Segment]) -> None:
    for segment in segments:
        (directory / str(segment)).unlink(missing_ok=True)


def _one(db: duckdb.DuckDBPyConnection, query: str) -> tuple[Any, ...]:
    row = db.execute(query).fetchone()
    if row is None:
        raise RunError(f"no answer to {query}")
    return row
