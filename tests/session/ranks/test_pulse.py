"""Who of the ranks is still there: what counts as gone, and what does not."""

import threading
import time

import pytest
import torch.distributed as dist

from narrowgauge.session.ranks.pulse import Pulse, give_up, given_up

SOON = 30  # seconds, for what takes a fraction of one


class Member:
    """A rank whose gather is open, or not, and what it was told."""

    def __init__(self, store, rank, *, open_since=None):
        self.since, self.why, self.told = open_since, "", threading.Event()
        self.pulse = Pulse(store, rank, 2, lambda: self.since, self.lost, beat=0.01, gone=0.1)

    def lost(self, why):
        self.why = why
        self.told.set()


@pytest.fixture
def store():
    return dist.HashStore()


def beats(store, rank, more):
    """Wait until a rank has counted so much further."""
    until, end = int(store.get(f"pulse/{rank}")) + more, time.monotonic() + SOON
    while int(store.get(f"pulse/{rank}")) < until:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rank_that_keeps_counting_is_only_slow(store):
    first, second = Member(store, 0, open_since=0.0), Member(store, 1)
    beats(store, 0, 40)  # of which each is a hundredth of a second: four times as long as a rank may be silent
    assert (first.why, second.why) == ("", "")
    first.pulse.stop()
    second.pulse.stop()


def test_a_rank_that_stands_still_is_gone_for_who_waits_for_it(store):
    first, second = Member(store, 0), Member(store, 1)
    second.pulse.stop()
    beats(store, 0, 40)
    assert not first.told.is_set()  # it waits for nobody
    first.since = time.monotonic()
    assert first.told.wait(SOON)
    assert first.why == "rank 1 gave no sign of life for 0.1 s"
    first.pulse._thread.join(SOON)
    assert given_up(store)  # so that a rank that was only stopped joins nothing


def test_a_rank_that_gave_up_says_so(store):
    first, second = Member(store, 0, open_since=time.monotonic()), Member(store, 1)
    give_up(store)
    assert first.told.wait(SOON)
    assert first.why == "another rank has given up merging"
    assert second.why == ""  # nothing of its own is open
    second.pulse.stop()


def test_a_store_that_is_gone_took_a_rank_with_it(store, monkeypatch):
    first, second = Member(store, 0), Member(store, 1)

    def dead(*args):
        raise RuntimeError("Broken pipe")

    first.pulse._store = type("Dead", (), dict.fromkeys(("set", "check", "multi_get"), dead))()
    first.since = time.monotonic()
    assert first.told.wait(SOON)
    assert first.why == "the ranks' store does not answer (RuntimeError)"
    second.pulse.stop()
