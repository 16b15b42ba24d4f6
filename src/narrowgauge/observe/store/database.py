"""One way to open DuckDB: in memory, silent, and told where to put what does not fit into memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import duckdb


def connect(spill: Path, *, threads: int | None = None, rereads: bool = True) -> duckdb.DuckDBPyConnection:
    """A new in-memory DuckDB whose large sorts use the folder `spill`.

    `threads` None means all cores. `rereads`: the same files are asked many times. Their footers are then kept, and
    for ever: whoever reads every file once would grow with each.
    """
    settings: dict[str, str | bool | int | float | list[str]] = {"temp_directory": str(spill)}
    if threads is not None:
        settings["threads"] = threads
    db = duckdb.connect(config=settings)
    # Otherwise a query of more than two seconds draws a bar into the terminal of whatever program we live in; but
    # DuckDB refuses to be told so in a notebook without ipywidgets, which has no bar.
    with contextlib.suppress(duckdb.InvalidInputException):
        db.execute("SET enable_progress_bar = false")
    if rereads:
        with contextlib.suppress(duckdb.Error):  # segments never change, so a footer that was parsed once stays true
            db.execute("SET parquet_metadata_cache = true")
    return db
