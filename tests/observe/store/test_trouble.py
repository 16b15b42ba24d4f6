"""The disk fills, stalls or vanishes; processes fork and die. Training never notices, the run stays readable."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import duckdb
import numpy as np
import pytest

from narrowgauge.errors import RunError
from narrowgauge.observe.store import RunWriter, database, manifest, open_run, waiting, writer_thread
from narrowgauge.observe.store.segments import SegmentWriter

SITES = [f"layers.{number}:input" for number in range(200)]


def record(writer: RunWriter, step: int, columns: int = 4) -> None:
    values = np.random.default_rng(step).random((columns, len(SITES)))  # random: nothing for zstd to gain
    writer.add_tensors(step, SITES, {f"m{number}": row for number, row in enumerate(values)})
    writer.add_scalars(step, loss=1.0 / (step + 1))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, timeout=60)


# -- a full disk ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A real filesystem of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small filesystem can't be mounted here: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_fills_stops_the_watch_with_one_warning(small_disk, caplog):
    run_folder = small_disk / "run"
    writer = RunWriter(run_folder, {"command": "train.py"})
    for step in range(600):  # 3.8 MB of random numbers
        record(writer, step)
        if step % 50 == 49:
            writer.flush()
    writer.update_meta(late=1)
    assert not writer.flush()
    writer.close()

    (message,) = warnings_of(caplog)
    assert ": no space left on the device. Training goes on" in message
    assert f"the watch of {run_folder} stopped near step" in message
    assert "Training goes on unrecorded" in message
    assert "Make room or choose another folder" in message
    run = open_run(run_folder)
    assert run.status == "stopped"
    assert run.reason == "no space left on the device"
    steps = run.series(SITES[0], "m0")[0]
    assert steps.tolist() == list(range(len(steps)))
    assert 50 <= len(steps) < 600
    assert run.lost["tensors"] == (600 - len(steps)) * len(SITES)
    assert not list(run_folder.rglob(".*"))  # no half-written file takes room


def test_a_disk_without_a_single_free_block(small_disk, caplog):
    writer = RunWriter(small_disk / "run")
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
    record(writer, 0)
    assert not writer.flush()
    writer.close()
    assert len(warnings_of(caplog)) == 1
    run = open_run(small_disk / "run")  # not even run.json could be written anew
    assert (run.status, run.ends.words) == ("stopped", "stopped: no space left on the device")
    assert run.lost == {"tensors": len(SITES), "scalars": 1, "events": 0}
    with pytest.raises(RunError, match=r"cannot be written .No space left on device.. Make room"):
        RunWriter(small_disk / "another")


ASYNC = (
    'IO Error: Async write failed for range [offset=0, size=2386]: {"exception_type":"IO","exception_message":'
    '"Could not write file \\"/runs/a.parquet\\": %s","errno":"%d"}'
)


def test_where_no_file_can_grow_the_end_is_still_told(tmp_path):
    """What a full disk does, by the size that a process may give to files: what has been there can be written over."""
    pytest.importorskip("resource")
    program = """
        import random, resource, sys
        from narrowgauge.observe.store import RunWriter
        writer = RunWriter(sys.argv[1], {"command": "train.py", "notes": ["x" * 1000]})
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
        for step in range(200):
            writer.add_scalars(step, loss=random.random())  # nothing for zstd to gain
        assert not writer.flush()
        writer.add_scalars(200, loss=1.0)
        writer.update_meta(steps=2)
        writer.close()
        """
    done = run_python(program, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "stopped near step 199: a file reached the size that this process may write. Training" in done.stderr
    run = open_run(tmp_path)
    assert (run.status, run.ends.words) == ("stopped", "stopped: a file reached the size that this process may write")
    assert run.lost == {"tensors": 0, "scalars": 201, "events": 0}
    assert run.meta == {"command": "train.py", "notes": ["x" * 1000]}  # as it was
    assert manifest.read(tmp_path)["ended"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["run.json"]


@pytest.mark.parametrize("word", ["no ", "\u5b9f\u9a13"])
def test_a_reason_that_is_long_finds_room_as_far_as_it_goes(tmp_path, monkeypatch, caplog, word):
    def fails(*_):
        raise OSError(word * 1000)

    writer = RunWriter(tmp_path, {"command": "train.py"})
    monkeypatch.setattr("narrowgauge.observe.store.segments.copy_aside", fails)
    monkeypatch.setattr(manifest, "write", fails)
    writer.add_scalars(0, loss=1.0)
    writer.close()
    run = open_run(tmp_path)
    assert (run.status, run.meta) == ("stopped", {"command": "train.py"})
    assert (word * 1000).startswith(run.reason)
    assert 290 <= len(json.dumps(run.reason)) <= 300


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ": no space left on the device. Training"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (MemoryError(), "MemoryError"),
        (duckdb.IOException("IO Error: Could not write file: Disk quota exceeded"), ": the disk quota is used up. T"),
        (duckdb.IOException(ASYNC % ("No space left", errno.ENOSPC)), ": no space left on the device. Training"),
        (duckdb.IOException(ASYNC % ("Oops", errno.EIO)), ': Could not write file "/runs/a.parquet": Oops. Training'),
    ],
)
def test_any_failure_to_write_is_told_once_and_never_raised(tmp_path, monkeypatch, caplog, error, words):
    def fail(*_: object) -> None:
        raise type(error)(*error.args)  # a fresh one: the parameter would keep its traceback, and DuckDB in it, alive

    writer = RunWriter(tmp_path / "run")
    record(writer, 0)
    assert writer.flush()
    monkeypatch.setattr("narrowgauge.observe.store.segments.copy_aside", fail)
    for step in range(1, 5):
        record(writer, step)
        writer.add_event(step, "nan", "loss is NaN")
        assert not writer.flush()
    writer.close()
    (message,) = warnings_of(caplog)
    assert words in message
    assert writer.problem
    run = open_run(tmp_path / "run")
    assert run.status == "stopped"
    assert run.steps.tolist() == [0]
    assert run.lost == {"tensors": 4 * len(SITES), "scalars": 4, "events": 4}


LITTLE_MEMORY = """
    import re, resource, sys
    from pathlib import Path
    from narrowgauge.errors import RunError
    from narrowgauge.observe.store import RunWriter, open_run

    folder, where = Path(sys.argv[1]), sys.argv[2]

    def leave(room):
        used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))

    try:
        if where == "begin":
            leave(300 << 20)
        writer = RunWriter(folder, {"command": "train.py"})
        leave(300 << 20)
        for step in range(200):
            writer.add_scalars(step, loss=1.0)
        writer.close()
        open_run(folder)
    except (OSError, RunError) as error:
        print(error)
    print("the program goes on")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc to read the size from")
@pytest.mark.parametrize("where", ["begin", "write"])
def test_a_process_with_little_memory_left_is_not_ended_by_duckdb(tmp_path, where):
    """Where `ulimit -v` leaves it no memory for its own threads, it aborts or breaks off with a signal."""
    ended = run_python(LITTLE_MEMORY, tmp_path / "run", where)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "the program goes on"), ended.stderr
    if where == "begin":
        assert "less than 768 MiB of memory is left to this process" in ended.stdout
    else:
        assert "stopped near step 199: too little memory is left to this process" in ended.stderr
        assert ended.stdout.startswith(f"{tmp_path / 'run'} cannot be read: too little memory is left to this process")
        assert manifest.read(tmp_path / "run")["status"] == "stopped"


def test_a_segment_that_cannot_be_made_durable_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    writer = RunWriter(tmp_path / "run")
    monkeypatch.setattr("narrowgauge.observe.store.segments.os.fsync", fail)
    record(writer, 0)
    assert not writer.flush()
    writer.close()
    assert "Input/output error" in warnings_of(caplog)[0]
    assert sorted(path.name for path in (tmp_path / "run").rglob("*") if path.is_file()) == ["run.json"]


def test_a_folder_that_vanishes(tmp_path, caplog):
    writer = RunWriter(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run").rmdir()
    record(writer, 0)
    assert not writer.flush()
    writer.close()
    assert "No such file or directory" in warnings_of(caplog)[0]
    assert len(warnings_of(caplog)) == 1


@pytest.fixture(params=[0o555, 0o000], ids=["not writable", "not even to be looked into"])
def locked(request):
    """A folder that is not for this process. Root may do everything, so it is nobody meanwhile."""
    folder, is_root = Path(tempfile.mkdtemp()), os.geteuid() == 0
    folder.chmod(request.param)
    if is_root:
        os.seteuid(65534)
    yield folder
    if is_root:
        os.seteuid(0)
    folder.rmdir()


def test_a_folder_without_permission(locked):
    with pytest.raises(RunError, match=r"Permission denied.. Make room, make it writable, or choose another folder"):
        RunWriter(locked / "run")


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunError, match=r"run is a file; expected a folder to write a run into"):
        RunWriter(tmp_path / "run")
    with pytest.raises(RunError, match=r"cannot be written .Not a directory."):
        RunWriter(tmp_path / "run" / "below")
    assert (tmp_path / "run").read_text() == "mine"


# -- a slow disk ---------------------------------------------------------------------------------


def test_a_slow_disk_costs_rows_not_time_nor_memory(tmp_path, monkeypatch, caplog):
    gate = threading.Event()
    slow = SegmentWriter.tensors
    monkeypatch.setattr(SegmentWriter, "tensors", lambda self, batches: (gate.wait(30), slow(self, batches))[1])
    writer = RunWriter(tmp_path, queue_bytes=1 << 20, flush_bytes=100_000)
    seconds = []
    for step in range(1000):  # 6.4 MB
        started = time.perf_counter()
        record(writer, step)
        seconds.append(time.perf_counter() - started)
        assert writer._waiting.held <= 1 << 20
    assert np.median(seconds) < 0.002
    assert writer.lost["tensors"] > 0
    gate.set()
    assert writer.flush()
    record(writer, 1000)
    writer.close()

    (message,) = warnings_of(caplog)
    assert "too slow: more than 1 MiB wait to be written, so rows are dropped, first at step 1" in message
    run = open_run(tmp_path)
    assert run.status == "complete"
    recorded = len(run.series(SITES[0], "m0")[0])
    assert recorded + run.lost["tensors"] // len(SITES) == 1001
    assert run.steps[-1] == 1000
    assert run.scalars("loss").rows == 1001  # the loss curve is never what is dropped
    events = run.events("rows_lost")  # one or two: a segment may have begun while rows were dropped
    reported = [json.loads(data)["rows"] for data in events["data"]]
    assert sum(reported) == run.lost["tensors"]
    assert events["message"][0] == f"{reported[0]} tensor rows were dropped: the disk was too slow"


def test_scalars_are_bounded_too(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "SMALL_ROWS", 10)
    with RunWriter(tmp_path) as run_writer:
        for step in range(20):
            run_writer.add_scalars(step, loss=1.0)
    assert open_run(tmp_path).lost["scalars"] == 10
    assert len(warnings_of(caplog)) == 1


# -- processes -----------------------------------------------------------------------------------


def test_a_killed_process_loses_at_most_the_last_segment(tmp_path):
    run_folder = tmp_path / "run"
    program = """
        import sys, time, numpy
        from narrowgauge.observe.store import RunWriter
        writer = RunWriter(sys.argv[1], {"command": "train.py"}, flush_seconds=0.2)
        for step in range(100_000):
            writer.add_tensors(step, ["a:input", "b:input"], {"amax": numpy.array([step, -step])})
            writer.add_scalars(step, loss=1 / (step + 1))
            if step % 10 == 0:
                print(step, flush=True)
            time.sleep(0.001)
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(run_folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline and len(list(run_folder.glob("tensors/*.parquet"))) < 5:
            time.sleep(0.02)
        assert open_run(run_folder).status == "running"
    finally:
        process.kill()
        printed = process.communicate()[0].split()
    run = open_run(run_folder)
    assert run.status == "killed"
    steps, values = run.series("a:input", "amax")
    assert steps.tolist() == values.tolist() == list(range(len(steps)))
    assert len(steps) >= int(printed[-1]) - 500  # 0.2 s of steps of 1 ms, and as much while it was written
    assert run.scalars("loss").rows >= len(steps)

    with RunWriter(run_folder, resume=True) as resumed:  # and it can be continued
        resumed.add_tensors(len(steps), ["a:input"], {"amax": np.array([len(steps)])})
    assert open_run(run_folder).status == "complete"
    assert not list(run_folder.rglob(".*"))


@pytest.mark.parametrize(
    ("ending", "status", "returncode"), [("", "complete", 0), ("raise ValueError('x')", "failed", 1)]
)
def test_a_program_that_ends_without_closing(tmp_path, ending, status, returncode):
    program = f"""
import sys, numpy
from narrowgauge.observe.store import RunWriter
writer = RunWriter(sys.argv[1])
writer.add_tensors(0, ["a:input"], {{"amax": numpy.array([1.0])}})
{ending}
"""
    done = run_python(program, tmp_path / "run")
    assert done.returncode == returncode, done.stderr
    run = open_run(tmp_path / "run")
    assert run.status == status
    assert run.steps.tolist() == [0]


def test_a_forked_child_never_writes(tmp_path):
    program = """
        import os, sys, numpy
        from narrowgauge.observe.store import RunWriter
        writer = RunWriter(sys.argv[1], flush_seconds=0.01)
        for step in range(200):  # forks meet the writer thread at work, its lock held
            writer.add_tensors(step, ["a:input"], {"amax": numpy.array([1.0])})
            if step % 10 == 0:
                child = os.fork()
                if child == 0:
                    writer.add_tensors(999, ["a:input"], {"amax": numpy.array([9.0])})
                    writer.add_scalars(999, loss=9.0)
                    writer.add_event(999, "nan", "from the child")
                    writer.update_meta(child=True)
                    assert writer.flush() is False
                    if step % 20:
                        sys.exit(0)  # runs the exit handlers
                    writer.close("failed")
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        writer.close()
        """
    done = run_python(program, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == list(range(200))
    assert run.events().rows == 0
    assert (run.status, run.meta) == ("complete", {})


def test_a_child_that_ends_by_itself_says_nothing(tmp_path):
    program = """
        import os, sys, numpy
        from narrowgauge.observe.store import RunWriter
        writer = RunWriter(sys.argv[1])
        for step in range(2):
            writer.add_tensors(step, ["a:input"], {"amax": numpy.array([1.0])})
            assert writer.flush()
            if os.fork() == 0:
                sys.exit(0)
            assert os.wait()[1] == 0
        writer.close()
        """
    done = run_python(program, tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert open_run(tmp_path / "run").steps.tolist() == [0, 1]


def test_a_child_forked_while_the_writer_holds_its_lock_does_not_hang(tmp_path):
    program = """
        import os, signal, sys, threading, time, numpy
        from narrowgauge.observe.store import RunWriter
        writer = RunWriter(sys.argv[1])
        held = threading.Event()
        def hold():
            with writer._changed:
                held.set()
                time.sleep(1)
        threading.Thread(target=hold).start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            writer.add_tensors(0, ["a:input"], {"amax": numpy.array([9.0])})
            writer.add_scalars(0, loss=9.0)
            writer.add_event(0, "nan", "from the child")
            writer.update_meta(child=True)
            writer.flush()
            writer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        writer.close()
        """
    done = run_python(program, tmp_path / "run")
    assert done.returncode == 0, done.stderr


def test_a_long_query_draws_nothing_into_the_terminal(tmp_path):
    """DuckDB's progress bar goes to the standard output of the training program; a query of 3 s would show it."""
    program = """
        import sys
        from pathlib import Path
        from narrowgauge.observe.store import RunWriter, open_run
        with RunWriter(sys.argv[1]) as writer:
            db = writer._thread._segments.db
            assert not db.execute("SELECT current_setting('enable_progress_bar')").fetchone()[0]
        run = open_run(sys.argv[1])
        assert not run.sql("SELECT current_setting('enable_progress_bar') AS bar")["bar"][0]
        """
    done = run_python(program, tmp_path / "run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- two writers, resuming -----------------------------------------------------------------------


def test_a_notebook_without_widgets_has_no_progress_bar_to_switch_off(tmp_path):
    """DuckDB asks IPython where it runs, and refuses the setting where it could draw no bar."""
    code = """
    import sys, types
    kernel = types.SimpleNamespace(config={"IPKernelApp": {}})
    sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: kernel)
    sys.modules["ipywidgets"] = None
    import duckdb
    try:
        duckdb.connect().execute("SET enable_progress_bar = false")
    except duckdb.Error as error:
        print(str(error).partition("'")[2])
    from narrowgauge.observe.store import RunWriter, open_run
    with RunWriter(sys.argv[1]) as writer:
        writer.add_scalars(1, loss=0.5)
    print(open_run(sys.argv[1]).scalars("loss")["loss"].tolist())
    """
    done = run_python(code, tmp_path / "run")
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("required package 'ipywidgets' is missing")  # as in a notebook
    assert done.stdout.splitlines()[1] == "[0.5]"


def test_a_second_run_does_not_mix_with_the_first(tmp_path):
    RunWriter(tmp_path).close()
    with pytest.raises(RunError, match=r"already holds a run. Choose another folder, remove it, or continue it"):
        RunWriter(tmp_path)


def test_a_run_that_is_being_written_is_not_resumed(tmp_path):
    first = RunWriter(tmp_path)
    with pytest.raises(RunError, match=rf"is still being written by process {os.getpid()}. Stop it first"):
        RunWriter(tmp_path, resume=True)
    first.close()


def test_two_writers_at_the_same_moment(tmp_path, monkeypatch):
    RunWriter(tmp_path).close()
    # The other one wins the race: its run.json appears after this one has looked.
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(RunError, match=r"another process just began a run here"):
        RunWriter(tmp_path)


def test_resuming_clears_what_was_half_written(tmp_path):
    with RunWriter(tmp_path) as writer:
        record(writer, 0)
    half = tmp_path / "tensors" / ".rank0-00000001-00000001.parquet.4321"
    other = tmp_path / "tensors" / ".rank1-00000001-00000001.parquet.4321"  # its writer may be at work
    for path in (half, other):
        path.write_bytes(b"PAR1")
    RunWriter(tmp_path, resume=True).close()
    assert not half.exists()
    assert other.exists()


def test_steps_recorded_again_by_a_resumed_run_replace_the_first_ones(tmp_path):
    with RunWriter(tmp_path, {"command": "a", "seed": 1}) as writer:
        for step in range(6):
            writer.add_tensors(step, ["a:input"], {"amax": np.array([1.0])})
            writer.add_scalars(step, loss=1.0)
        writer.add_event(5, "nan", "the reason for going back")
    with RunWriter(tmp_path, {"command": "b"}, resume=True) as writer:  # from the checkpoint of step 3
        writer.add_scalars(3, loss=2.0)
        writer.add_tensors(4, ["a:input"], {"amax": np.array([2.0])})
    run = open_run(tmp_path)
    assert run.meta == {"command": "b", "seed": 1}
    assert run.series("a:input", "amax")[1].tolist() == [1, 1, 1, 2]
    assert run.series("a:input", "amax")[0].tolist() == [0, 1, 2, 4]
    assert run.scalars("loss")["loss"].tolist() == [1, 1, 1, 2]
    assert run.heatmap("amax")[2].tolist() == [[1, 1, 1, 2]]
    assert run.events().rows == 1


def test_a_process_id_in_use_again_is_not_taken_for_the_writer(tmp_path):
    writer = RunWriter(tmp_path)
    mine = manifest.read(tmp_path)
    stale = {**mine, "process": {**mine["process"], "started": 1}}
    if manifest.process_started(os.getpid()) is None:
        pytest.skip("this system does not tell when a process started")
    manifest.write(tmp_path, stale)
    assert open_run(tmp_path).status == "killed"
    manifest.write(tmp_path, {**stale, "process": {"pid": 1, "host": "elsewhere"}})
    assert open_run(tmp_path).status == "running"  # nobody here can know
    writer.close()


def test_rows_after_closing_are_counted_not_raised(tmp_path):
    writer = RunWriter(tmp_path)
    writer.close()
    record(writer, 0)
    writer.close("failed")
    assert writer.lost["tensors"] == len(SITES)
    assert open_run(tmp_path).status == "complete"


def test_a_run_that_nobody_could_begin_to_write_is_none(tmp_path, monkeypatch):
    def fails(*_):
        raise duckdb.Error("no room for a database")

    with monkeypatch.context() as broken:
        broken.setattr(SegmentWriter, "_open", fails)
        with pytest.raises(duckdb.Error, match="no room"):
            RunWriter(tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()
    with RunWriter(tmp_path / "run"):  # it may be begun again
        pass


def test_metrics_that_cannot_be_made_cost_no_scalars(tmp_path, monkeypatch, caplog):
    def refused(rows):
        raise ValueError("no metric today")

    monkeypatch.setattr(writer_thread, "finished", refused)
    with RunWriter(tmp_path / "run") as writer:
        record(writer, 1)
        writer.add_event(1, "told", "once")
        assert not writer.flush()
        assert "no metric today" in writer.problem
    run = open_run(tmp_path / "run")
    assert run.status == "stopped"
    assert run.scalars("loss")["loss"].tolist() == [0.5]
    assert run.events()["message"].tolist() == ["once"]
    assert writer.lost["tensors"] == len(SITES)
    assert len(warnings_of(caplog)) == 1


def test_who_begins_a_run_hears_whether_it_can_be_written_but_beside_another(tmp_path, monkeypatch):
    opened, connect = [], database.connect
    monkeypatch.setattr(database, "connect", lambda *args, **how: opened.append(args) or connect(*args, **how))
    with RunWriter(tmp_path / "run", flush_seconds=600) as writer:
        assert len(opened) == 1
        with RunWriter(tmp_path / "part", flush_seconds=600, beside=writer) as part:
            assert len(opened) == 1
            for each in writer, part:
                record(each, 1)
                assert each.flush()
            assert len(opened) == 5  # of each once for scalars, and once for tensors
    for name in "run", "part":
        assert open_run(tmp_path / name).scalars("loss").rows == 1


def test_the_end_may_be_asked_for_before_it_is_waited_for(tmp_path, monkeypatch):
    waits, write = threading.Event(), SegmentWriter.scalars
    monkeypatch.setattr(SegmentWriter, "scalars", lambda *args: waits.wait(60) and write(*args))
    writers = [RunWriter(tmp_path / name, flush_seconds=600) for name in ("one", "other")]
    for step, writer in enumerate(writers):
        record(writer, step)
        assert writer.end()
        record(writer, 5)  # comes too late
    waits.set()
    for writer in writers:
        writer.close("failed")
    for step, writer in enumerate(writers):
        run = open_run(writer.path)
        assert run.status == "complete"  # as was asked first
        assert run.scalars("loss")["step"].tolist() == [step]


def test_parts_of_a_run_that_are_written_at_the_same_time_open_one_database(tmp_path, monkeypatch):
    opened, connect, joined = [], database.connect, database.Shared.join
    together = threading.Barrier(2, timeout=30)

    def both(self, spill):
        db = joined(self, spill)
        if spill.parent.name != "run":
            together.wait()
        return db

    monkeypatch.setattr(database, "connect", lambda *args, **how: opened.append(args) or connect(*args, **how))
    with RunWriter(tmp_path / "run", flush_seconds=600) as writer:
        parts = [RunWriter(tmp_path / name, flush_seconds=600, beside=writer) for name in ("one", "other")]
        monkeypatch.setattr(database.Shared, "join", both)
        opened.clear()
        for first, part in enumerate(parts):
            part.add_tensors(1, SITES[first:], {"amax": np.arange(first, len(SITES), dtype=float)})
            part.end()
        for part in parts:
            part.close()
        assert len(opened) == 1
        assert writer._shared._db is None
    for first, name in enumerate(("one", "other")):
        assert open_run(tmp_path / name).tensors()["site"].tolist() == sorted(SITES[first:])
