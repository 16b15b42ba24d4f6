"""What a reader spilled and could not remove, because it was killed, goes with the next reader."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap

import pytest

from narrowgauge.observe.store import RunWriter, database, open_run

KILLED_READER = """
    import os, sys, threading, time
    from narrowgauge.observe.store.database import connect, spill
    place = spill()
    db = connect(place, threads=1)
    assert not place.exists()  # before anything is spilled
    db.execute("SET memory_limit = '60MB'")
    query = "CREATE TABLE t AS SELECT hash(range) AS h, range AS r FROM range(20_000_000) ORDER BY h"
    threading.Thread(target=lambda: db.execute(query), daemon=True).start()
    while not (place.is_dir() and len(os.listdir(place)) > 1):
        time.sleep(0.002)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder for temporary files, and a reader's start."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with RunWriter(tmp_path / "run") as writer:
        writer.add_scalars(0, loss=1.0)
    return folder, lambda: open_run(tmp_path / "run").scalars("loss").rows


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_what_a_killed_reader_spilled_is_removed_by_the_next(place):
    folder, read = place
    environment = {**os.environ, "TMPDIR": str(folder)}
    words = [sys.executable, "-c", textwrap.dedent(KILLED_READER)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(folder.glob("*/*"))) > 1
    assert read() == 1
    assert list(folder.iterdir()) == []


def test_nothing_else_is_removed(place, tmp_path):
    folder, read = place
    alive, dead = database.spill().name, f"{database._mine()}{2**22 + 1}-1-0"  # no system counts that far
    elsewhere = dead.replace(socket.gethostname(), "another-machine")
    for name in (alive, elsewhere, "narrowgauge-cache-0", dead):
        (folder / name).mkdir()
        (folder / name / "duckdb_temp_block-1").touch()
    (folder / dead / "notes.txt").touch()  # nobody knows whose
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "duckdb_temp_block-1").touch()
    (folder / f"{dead}1").symlink_to(tmp_path / "target")
    database._sweep.cache_clear()
    assert read() == 1
    kept = {str(path.relative_to(folder)) for path in folder.glob("*/*")} - {f"{dead}1/duckdb_temp_block-1"}
    assert kept == {f"{name}/duckdb_temp_block-1" for name in (alive, elsewhere, "narrowgauge-cache-0")} | {
        f"{dead}/notes.txt"
    }
    assert (tmp_path / "target" / "duckdb_temp_block-1").exists()
