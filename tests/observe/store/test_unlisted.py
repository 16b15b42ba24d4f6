"""A program that waits for all threads does not wait for ours."""

import os
import shutil
import threading

import pytest

from narrowgauge.observe.store import RunWriter
from narrowgauge.observe.store.unlisted import UnlistedThread, unlist


def test_a_program_that_writes_a_run_has_the_threads_that_it_started(tmp_path):
    before = threading.enumerate()
    with RunWriter(tmp_path / "run") as writer:
        writer.add_scalars(1, loss=1.0)
        assert writer.flush()
        assert set(threading.enumerate()) <= set(before)  # those of earlier tests may end meanwhile


def test_a_thread_that_asked_for_itself_is_not_listed(tmp_path):
    done, go = threading.Event(), threading.Event()

    def run():
        threading.current_thread()
        unlist()
        done.set()
        go.wait()
        threading.current_thread()

    before = set(threading.enumerate())
    thread = UnlistedThread(run)
    done.wait()
    assert set(threading.enumerate()) <= before
    go.set()
    thread.join()
    assert set(threading.enumerate()) <= before


def test_nor_is_the_writer_s_that_has_warned(tmp_path):
    before = set(threading.enumerate())
    with RunWriter(tmp_path / "run") as writer:
        shutil.rmtree(tmp_path / "run")
        writer.add_scalars(1, loss=1.0)
        assert not writer.flush()
        assert set(threading.enumerate()) <= before


def test_it_runs_and_can_be_waited_for():
    go, told = threading.Event(), []

    def run():
        go.wait()
        told.append((thread.is_this(), thread.is_alive()))

    thread = UnlistedThread(run)
    thread.join(0.01)
    assert (thread.is_alive(), thread.is_this(), told) == (True, False, [])
    go.set()
    thread.join()
    assert (thread.is_alive(), told) == (False, [(True, True)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
def test_a_forked_child_waits_for_none():
    go = threading.Event()
    thread = UnlistedThread(go.wait)
    child = os.fork()
    if not child:
        thread.join()  # would last for ever
        os._exit(int(thread.is_alive()))
    assert os.waitpid(child, 0)[1] == 0
    assert thread.is_alive()
    go.set()
    thread.join()
