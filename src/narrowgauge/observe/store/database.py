"""One way to open DuckDB: in memory, silent, and told where to put what does not fit into memory; alone or shared."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import mmap
import os
import socket
import stat
import tempfile
import threading
from pathlib import Path

import duckdb

try:
    import resource
except ImportError:  # Windows limits no addresses
    resource = None  # type: ignore[assignment]

from narrowgauge.observe.store import manifest as manifests

SPILLS = "narrowgauge-spill"
FILES = "duckdb_temp"  # what DuckDB's own in such a folder begin with
ROOM = 768 << 20  # bytes of addresses; DuckDB 2.0 took 642 MiB to open first and write a segment
_number = itertools.count()  # of this process: two that are open at once do not meet there


def connect(spill: Path, *, threads: int | None = None, rereads: bool = True) -> duckdb.DuckDBPyConnection:
    """A new in-memory DuckDB whose large sorts use the folder `spill`.

    `threads` None means all cores. `rereads`: the same files are asked many times. Their footers are then kept, and
    for ever: whoever reads every file once would grow with each. Errors: OSError where no file can be opened, or
    where memory is limited (`ulimit -v`) and used up.
    """
    # Without a file descriptor, or memory for a thread of its own, DuckDB would end the whole process.
    os.close(os.open(os.devnull, os.O_RDONLY))
    _try_room()
    settings: dict[str, str | bool | int | float | list[str]] = {"temp_directory": str(spill)}
    if threads is not None:
        settings["threads"] = threads
    db = _silent(duckdb.connect(config=settings))
    if rereads:
        with contextlib.suppress(duckdb.Error):  # segments never change, so a footer that was parsed once stays true
            db.execute("SET parquet_metadata_cache = true")
    return db


def _try_room() -> None:
    if resource is None or resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    try:
        mmap.mmap(-1, ROOM, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ).close()  # of no page that is used
    except OSError as error:
        raise OSError(errno.ENOMEM, f"less than {ROOM >> 20} MiB of memory is left to this process") from error


def _silent(db: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    # Otherwise a query of more than two seconds draws a bar into the terminal of whatever program we live in; but
    # DuckDB refuses to be told so in a notebook without ipywidgets, which has no bar.
    with contextlib.suppress(duckdb.InvalidInputException):
        db.execute("SET enable_progress_bar = false")
    return db


class Shared:
    """One DuckDB for several writers, open while any of them has joined: to open it takes longer than to write a file.

    What one of them registers, or makes as temporary, no other sees.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._db: duckdb.DuckDBPyConnection | None = None
        self._joined = 0

    def join(self, spill: Path) -> duckdb.DuckDBPyConnection:
        """A connection of the caller's own; the first one says where all of them `spill`. Errors as `connect`."""
        with self._lock:
            if self._db is None:
                # One thread: compressing must not take the cores that train.
                self._db = connect(spill, threads=1, rereads=False)
            db = _silent(self._db.cursor())
            self._joined += 1
            return db

    def leave(self, db: duckdb.DuckDBPyConnection) -> None:
        """The caller needs it no more."""
        with self._lock:
            db.close()
            self._joined -= 1
            if not self._joined and self._db is not None:
                self._db.close()
                self._db = None


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
