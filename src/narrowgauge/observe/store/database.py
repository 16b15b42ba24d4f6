"""One way to open DuckDB: in memory, silent, and told where to put what does not fit into memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import stat
import tempfile
from pathlib import Path

import duckdb

from narrowgauge.observe.store import manifest as manifests

SPILLS = "narrowgauge-spill"
FILES = "duckdb_temp"  # what DuckDB's own in such a folder begin with
_number = itertools.count()  # of this process: two that are open at once do not meet there


def connect(spill: Path, *, threads: int | None = None, rereads: bool = True) -> duckdb.DuckDBPyConnection:
    """A new in-memory DuckDB whose large sorts use the folder `spill`.

    `threads` None means all cores. `rereads`: the same files are asked many times. Their footers are then kept, and
    for ever: whoever reads every file once would grow with each. Errors: OSError where no file can be opened.
    """
    os.close(os.open(os.devnull, os.O_RDONLY))  # without a file descriptor, DuckDB would end the whole process
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


def spill() -> Path:
    """A reader's folder for `connect`: the run itself may be read-only. Nobody makes it before something is spilled.

    DuckDB removes it at its end. One whose process was killed is removed here, if it is this user's and this host's.
    """
    _sweep(tempfile.gettempdir(), os.getpid())
    process = manifests.this_process()
    return Path(tempfile.gettempdir()) / f"{_mine()}{process['pid']}-{process['started'] or 0}-{next(_number)}"


def _mine() -> str:
    """What the names of this host's folders begin with; other hosts, and containers, may share the place."""
    return f"{SPILLS}-{socket.gethostname()}-"


@functools.cache  # once per process
def _sweep(place: str, _pid: int) -> None:
    """Remove the folders of dead processes, and in them nothing that is not DuckDB's."""
    own = os.getuid() if hasattr(os, "getuid") else 0
    with contextlib.suppress(OSError):
        for folder in Path(place).glob(f"{_mine()}*"):
            with contextlib.suppress(OSError, ValueError):
                pid, started, _ = map(int, folder.name.removeprefix(_mine()).split("-"))
                process = {"pid": pid, "started": started or None, "host": socket.gethostname()}
                found = folder.lstat()
                if found.st_uid != own or not stat.S_ISDIR(found.st_mode) or manifests.is_alive({"process": process}):
                    continue
                for file in folder.glob(f"{FILES}*"):
                    file.unlink(missing_ok=True)
                folder.rmdir()
