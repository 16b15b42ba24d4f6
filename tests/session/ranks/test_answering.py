"""A store whose process is stopped, or its machine: nobody who asks it waits for longer than for seconds."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from narrowgauge.session.ranks.agreement import Agreement, Posted
from narrowgauge.session.ranks.answering import OPEN, lines
from narrowgauge.session.ranks.meeting import Meeting, Met
from narrowgauge.session.ranks.pulse import given_up

HOLDER = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 1, is_master=True, wait_for_workers=False)
print("here", flush=True)
time.sleep(300)
"""
MINE = Posted(4, "cpu", "d1")


@pytest.fixture
def holder(free_port):
    """A process that has the store, and a connection to it."""
    words = [sys.executable, "-c", HOLDER, str(free_port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process, dist.TCPStore("127.0.0.1", free_port, None, is_master=False, wait_for_workers=False)
        process.kill()


@pytest.fixture
def agreement(holder, monkeypatch):
    monkeypatch.setattr("narrowgauge.session.ranks.meeting.ANSWERS", 0.5)
    meeting = Meeting(lambda: Met(holder[1], 1, 2))
    assert meeting.find()
    return Agreement(meeting.store("agreement"), 1, 2, patience=0.5)


ASKED = [
    lambda agreement: agreement.post(2, MINE, "layout"),
    lambda agreement: agreement.decided(1),
    lambda agreement: agreement.decide(1),
    lambda agreement: agreement.missing(1),
    lambda agreement: agreement.posted(1),
    lambda agreement: agreement.end(),
    lambda agreement: agreement.left(0),
    lambda agreement: agreement.was_read(),
    lambda agreement: agreement.given_up(),
]


@pytest.mark.skipif(not OPEN.is_dir(), reason="needs /proc")
@pytest.mark.parametrize("ask", ASKED)
def test_what_is_asked_of_it_raises_in_time_and_is_asked_no_more(holder, agreement, ask):
    process, store = holder
    agreement.post(1, MINE, "layout")
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # or it answers once more
    for within in (5.0, 0.4):  # less than it waits
        began = time.monotonic()
        with pytest.raises(dist.DistError):
            ask(agreement)
        assert time.monotonic() - began < within
    agreement.give_up()
    os.kill(process.pid, signal.SIGCONT)
    with pytest.raises(dist.DistError):  # what comes now is the answer to what was asked before
        ask(agreement)
    others = dist.PrefixStore("narrowgauge/1/agreement", store)
    deadline = time.monotonic() + 10
    while not given_up(others) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert given_up(others)


@pytest.mark.skipif(not OPEN.is_dir(), reason="needs /proc")
def test_looking_for_a_connection_opens_and_closes_nothing(holder):
    before = sorted(os.listdir(OPEN))
    assert len(lines(holder[1])) == 1
    assert sorted(os.listdir(OPEN)) == before


def test_it_answers_as_ever(holder, agreement):
    agreement.post(1, MINE, "layout")
    assert agreement.missing(1) == [0]
    assert not agreement.decide(1).merge
    assert agreement.is_here(1)
    assert not agreement.is_here(0)
