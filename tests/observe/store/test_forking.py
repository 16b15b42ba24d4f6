"""Forks and a writer that is inside of DuckDB: no child gets an open one, nobody waits for long."""

import os
import threading
import time

import numpy as np
import pytest
from tests.observe.store.test_trouble import run_python

from narrowgauge.observe.store import RunWriter, forking, open_run, writer_thread

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

AMID = """
    import os, sys, threading, numpy
    from narrowgauge.observe.store import RunWriter, segments, writer_thread
    writer, amid = RunWriter(sys.argv[1]), threading.Event()
    where, what = {"segments": segments, "writer_thread": writer_thread}[sys.argv[2]], sys.argv[3]
    quick = getattr(where, what)
    def slow(*rest):
        amid.set()
        threading.Event().wait(0.1)
        return quick(*rest)
    setattr(where, what, slow)
    for step in range(5):
        writer.add_scalars(step, loss=1.0)
        writer.add_tensors(step, ["a:input"], {"amax": numpy.array([1.0])})
        flushing = threading.Thread(target=writer.flush)
        flushing.start()
        amid.wait()
        if os.fork() == 0:
            sys.exit(0)
        amid.clear()
        assert os.wait()[1] == 0
        flushing.join()
    writer.close()
    """

GIVES_UP = """
    import os, sys, threading
    from narrowgauge.observe.store import RunWriter, segments
    writer, gives_up, forked = RunWriter(sys.argv[1]), threading.Event(), threading.Event()
    stop = writer._thread._stop
    def full(*_):
        raise OSError("No space left on device")
    def slow(*rest):
        gives_up.set()
        forked.wait(10)
        stop(*rest)
    segments.copy_aside, writer._thread._stop = full, slow
    writer.add_scalars(0, loss=1.0)
    flushing = threading.Thread(target=writer.flush)
    flushing.start()
    gives_up.wait()
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
    forked.set()
    flushing.join()
    writer.close()
    """


@pytest.mark.parametrize("slow", [("segments", "copy_aside"), ("writer_thread", "finished")])
def test_a_child_forked_amid_a_write_says_nothing(tmp_path, slow):
    done = run_python(AMID, tmp_path / "run", *slow)
    assert (done.returncode, done.stderr) == (0, "")
    assert open_run(tmp_path / "run").steps.tolist() == list(range(5))


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr(forking, "PATIENCE", 0.5)
    return forking.Gate()


def inside(gate, until):
    """A thread that is, until then."""
    entered = threading.Event()

    def run():
        with gate.inside():
            entered.set()
            until.wait(10)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, entered


def took(gate):
    began = time.monotonic()
    gate.before_fork()
    gate.after_in_parent()
    return time.monotonic() - began


def test_a_child_forked_while_the_writer_gives_up_says_nothing(tmp_path):
    done = run_python(GIVES_UP, tmp_path / "run")
    assert done.returncode == 0
    [told] = done.stderr.splitlines()  # the writer's own
    assert "no space left on the device" in told


def test_a_fork_does_not_wait_for_metrics_that_are_made(tmp_path, monkeypatch):
    makes, made = threading.Event(), threading.Event()

    def slow(rows):
        makes.set()
        made.wait(10)
        return rows

    monkeypatch.setattr(writer_thread, "finished", slow)
    with RunWriter(tmp_path) as writer:
        writer.add_scalars(0, loss=1.0)
        writer.add_tensors(0, ["a:input"], {"amax": np.array([1.0])})
        flushing = threading.Thread(target=writer.flush)
        flushing.start()
        assert makes.wait(10)
        assert took(forking.GATE) < 0.4
        assert writer._thread._segments._db is None
        assert open_run(tmp_path).scalars("loss").rows == 1  # written first, and whole
        made.set()
        flushing.join(10)
    assert open_run(tmp_path).steps.tolist() == [0]


def test_nobody_enters_while_a_process_is_forked(gate):
    (until := threading.Event()).set()
    gate.before_fork()
    thread, entered = inside(gate, until)
    assert not entered.wait(0.05)
    gate.after_in_parent()
    assert entered.wait(5)
    thread.join(5)


def test_in_the_child_nobody_is_inside(gate):
    thread, entered = inside(gate, until := threading.Event())
    entered.wait()
    gate.before_fork()
    changed = gate._changed
    gate.after_in_child()
    assert took(gate) < 0.4
    changed.release()  # the parent's
    until.set()
    thread.join(5)


def test_a_write_that_takes_long_is_waited_for_once(gate):
    until = threading.Event()
    thread, entered = inside(gate, until)
    entered.wait()
    assert 0.5 <= took(gate) < 5
    assert took(gate) < 0.4
    until.set()
    thread.join()
    again, entered = inside(gate, until := threading.Event())
    entered.wait()
    threading.Timer(0.05, until.set).start()
    assert 0.04 < took(gate) < 0.5  # another one is
    again.join()


def test_a_thread_that_forks_inside_does_not_wait_for_itself(gate):
    with gate.inside():
        assert took(gate) < 0.4


def test_a_fork_gets_its_turn_between_many_writes(gate):
    ends = threading.Event()

    def write():
        while not ends.is_set():
            with gate.inside():
                time.sleep(0.005)

    thread = threading.Thread(target=write)
    thread.start()
    waited = [took(gate) for _ in range(20)]
    ends.set()
    thread.join()
    assert max(waited) < 0.5
    assert not gate._in_vain


def test_a_fork_that_is_interrupted_lets_others_in(gate, monkeypatch):
    until = threading.Event()
    thread, entered = inside(gate, until)
    entered.wait()
    monkeypatch.setattr(gate._changed, "wait_for", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gate.before_fork()
    monkeypatch.undo()
    gate.after_in_parent()
    gate.after_in_parent()  # without it
    until.set()
    thread.join(5)
    with gate.inside():
        assert not gate._forks
