"""A long watched training holds on to nothing: no object, no open file, no thread, no memory of DuckDB's.

benchmarks/soak.py does the same from outside, for 100 000 steps.
"""

import contextlib
import ctypes
import gc
import os
import threading
from collections import Counter
from pathlib import Path

import duckdb
import pytest
import torch
from torch import nn

from narrowgauge.observe.store import RunWriter, database, open_run
from narrowgauge.observe.store.database import Shared
from narrowgauge.observe.store.segments import SegmentWriter
from narrowgauge.session.attach import Session
from narrowgauge.session.plan import Plan

WARM, STEPS, PER_SEGMENT = 100, 400, 4


FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split(" ")]


def allocated():
    """Bytes that C and C++ hold, or 0 where there is no such question; other than of a process, this has no noise."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    ask.restype = Allocated
    found = ask()
    return found.uordblks + found.hblkhd


def open_files():
    """What is open, by what it leads to: a number is given out again, the inode of a pipe or a socket is not."""
    folder, found = Path("/proc/self/fd"), Counter()
    for link in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # the one that lists the folder
            found[os.readlink(link)] += 1
    return found


def kernel_threads():
    folder = Path("/proc/self/task")  # the thread that writes is not listed by Python
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def held():
    gc.collect()
    return len(gc.get_objects()), open_files(), Counter(threading.enumerate()), kernel_threads(), allocated()


def test_nothing_grows(tmp_path):
    torch.manual_seed(0)
    writer = RunWriter(tmp_path, flush_seconds=1000)
    session = Session(
        Plan(variant="x", out=str(tmp_path), command=("train.py",), every=PER_SEGMENT, judge="current"), writer
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.optimizer_made(optimizer)
    x = torch.randn(16, 16)
    before = None
    for step in range(1, STEPS + 1):
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % PER_SEGMENT == 0:
            assert writer.flush()
        if step == WARM:
            before = held()
    # Of files and threads, those that are new: what earlier tests of this process left behind may end meanwhile.
    objects, files, threads, tasks, memory = (after - early for after, early in zip(held(), before, strict=True))
    session.finish()
    writer.close()
    run = open_run(tmp_path)
    assert run.scalars("loss").rows == STEPS
    assert len(set(run.tensors()["step"].tolist())) == STEPS // PER_SEGMENT
    segments = 2 * (STEPS - WARM) // PER_SEGMENT
    assert objects < 50
    assert (files, threads) == (Counter(), Counter())
    assert tasks < segments / 10
    assert memory < 10_000 * segments  # a footer that is kept is some 30 kB


def test_duckdb_is_opened_anew_for_what_is_written_at_once(tmp_path, monkeypatch):
    opened, connect = [], database.connect
    monkeypatch.setattr(database, "connect", lambda *args, **how: opened.append(connect(*args, **how)) or opened[-1])
    with RunWriter(tmp_path, flush_seconds=600) as writer:  # or its thread may come first, on a slow machine
        for step in range(12):
            writer.add_tensors(step, ["a:input", f"b{step % 2}:input"], {"amax": torch.tensor([step, -step]).numpy()})
            writer.add_scalars(step, loss=float(step))
            assert writer.flush()
            assert len(opened) == 1 + 2 * (step + 1)  # for scalars, and for tensors; the first shows that it can be
            with pytest.raises(duckdb.ConnectionException, match="closed"):
                opened[-1].execute("SELECT 1")
    with contextlib.closing(SegmentWriter(tmp_path / "more", 0, 0, {}, Shared())) as writing:
        kept = writing.db.execute("SELECT current_setting('parquet_metadata_cache')").fetchall()
    assert kept == [(False,)]
    run = open_run(tmp_path)
    assert run.series("a:input", "amax")[1].tolist() == list(range(12))
    assert run.series("b1:input", "amax")[1].tolist() == [-1, -3, -5, -7, -9, -11]
    assert run.scalars("loss")["loss"].tolist() == list(range(12))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
