"""Who is late at the end of a program is waited for while it lives; who is gone is not, and what is missing is told."""

import os
import threading
import time

import pytest
from tests.session.ranks.test_gone import writes
from tests.session.ranks.test_ranks import Clock, batch, events, made, row, train

from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store import open_run
from narrowgauge.session.ranks import patience, ranks
from narrowgauge.session.ranks.patience import SELDOM, Patience, has_ended, may_come

SHOWN = lambda rank, step: {"a:input": batch(rank, step)}  # noqa: E731
STEPS = 9


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(patience, "time", found)
    return found


@pytest.fixture
def living(monkeypatch):
    """Ranks may come, as their manifests have it."""
    monkeypatch.setattr(ranks, "PATIENCE", 0.3)
    monkeypatch.setattr(ranks, "may_come", may_come)


def never():
    return False


def test_one_that_lives_has_the_spare_seconds_once_for_all_that_is_waited_for(clock):
    mine = Patience(3.0, 12.0, lambda rank: True)
    waited = []
    for _ in range(3):
        began = clock.now
        assert not mine.wait(never, lambda: mine.all_coming([1, 2]))
        waited.append(clock.now - began)
    assert waited == pytest.approx([15.0, 3.0, 3.0], abs=2 * SELDOM)


def test_one_that_is_gone_has_only_the_seconds_of_each(clock):
    mine = Patience(3.0, 12.0, lambda rank: rank != 2)
    assert not mine.wait(never, lambda: mine.all_coming([1, 2]))
    assert clock.now == pytest.approx(3.0, abs=SELDOM)
    assert mine.spare == pytest.approx(12.0, abs=SELDOM)


@pytest.mark.parametrize(
    ("coming", "ended", "seconds"),
    [
        ({2}, {1}, 15.0),
        ({1, 2}, set(), 15.0),
        (set(), {1, 2}, 3.0),  # what they did has come by now, or never will
        ({2}, set(), 3.0),  # the first is gone
        (set(), {1}, 3.0),
    ],
)
def test_of_a_gather_the_rest_is_waited_for_when_one_has_done_its_part(clock, coming, ended, seconds):
    mine = Patience(3.0, 12.0, coming.__contains__, ended.__contains__)
    assert not mine.wait(never, lambda: mine.rest_coming([1, 2]))
    assert clock.now == pytest.approx(seconds, abs=2 * SELDOM)


def test_one_that_ends_as_it_is_asked_has_ended_well():
    ended = set()
    mine = Patience(3.0, 12.0, lambda rank: rank == 2 or bool(ended.add(1)), ended.__contains__)
    assert mine.rest_coming([1, 2])


def test_what_is_there_is_not_waited_for_and_what_came_last_is_seen(clock):
    mine, left = Patience(3.0, 12.0, lambda rank: True), []
    assert mine.wait(lambda: True, never)
    assert (clock.now, mine.spare) == (0.0, 12.0)
    assert mine.wait(lambda: bool(left), lambda: left.append("its last words"))  # and then it was gone
    assert mine.wait(lambda: clock.now > 10, lambda: True)
    assert mine.spare == pytest.approx(12.0 - 4.0, abs=2 * SELDOM)


def test_a_rank_may_come_until_its_process_is_gone_or_has_told_of_its_end(tmp_path):
    assert may_come(tmp_path, 1)  # on another machine's disk, perhaps
    writes(tmp_path, 1, os.getpid())
    writes(tmp_path, 2, 2**22 + 1)
    assert [may_come(tmp_path, rank) for rank in (1, 2)] == [True, False]
    manifests.write(tmp_path, {**manifests.read(tmp_path, 1), "status": "complete"})
    assert not may_come(tmp_path, 1)


def test_a_rank_has_ended_well_if_it_told_so(tmp_path):
    assert not has_ended(tmp_path, 1)
    writes(tmp_path, 1, os.getpid())
    for status, well in (("running", False), ("failed", False), ("complete", True)):
        manifests.write(tmp_path, {**manifests.read(tmp_path, 1), "status": status})
        assert has_ended(tmp_path, 1) is well


def test_a_rank_of_another_host_may_come_while_it_gives_signs_of_life(tmp_path):
    writes(tmp_path, 1, os.getpid())
    manifests.write(tmp_path, {**manifests.read(tmp_path, 1), "process": {"pid": 1, "started": 1, "host": "far"}})
    assert may_come(tmp_path, 1)
    long_ago = time.time() - 90
    os.utime(tmp_path / manifests.name(1), (long_ago, long_ago))
    assert not may_come(tmp_path, 1)


def ended(program, late):
    """All ranks end, the last one so many seconds later; how long the first one took."""
    *between, other = [threading.Timer(late * (rank is program[-1]), rank.finish) for rank in program[1:]]
    for each in (*between, other):
        each.start()
    began = time.monotonic()
    program[0].finish()
    took = time.monotonic() - began
    other.join()
    return took


@pytest.mark.parametrize(("every", "world"), [(1, 2), (6, 2), (1, 3), (6, 3)])
def test_what_a_late_rank_has_is_merged(tmp_path, living, every, world):
    program = made(tmp_path, every=every, world=world)
    train(program, STEPS, SHOWN)
    ended(program, 1.5)
    run = open_run(tmp_path / "run")
    table = run.scalars("tokens")
    assert dict(zip(table["step"].tolist(), table["tokens"].tolist(), strict=True)) == dict.fromkeys(
        range(1, STEPS + 1), 10.0 * world
    )
    recorded = sorted(set(run.tensors()["step"].tolist()))
    assert [row(run, "a:input", step)["numel"] for step in recorded] == [256 * world] * len(recorded)
    assert (events(run, "ranks_apart"), program[0].ranks.notes) == ([], [])


@pytest.mark.parametrize(("longer", "world"), [(0, 2), (1, 2), (2, 3)])
def test_a_step_that_a_rank_with_less_data_never_makes_is_not_waited_for(tmp_path, living, longer, world):
    program = made(tmp_path, every=3, world=world)
    train(program, 8, SHOWN)
    for _ in range(2):
        rank = program[longer]
        if rank.begin():
            rank.see("a:input", batch(longer, rank.step))
        rank.end(loss=float(rank.step), tokens=10.0)
    assert ended(program, 0.0) < 2.0
    table = open_run(tmp_path / "run").scalars("tokens")
    told = dict(zip(table["step"].tolist(), table["tokens"].tolist(), strict=True))
    assert told == dict.fromkeys(range(1, 9), 10.0 * world) | {9: 10.0, 10: 10.0}
    assert program[0].ranks.notes == []


def test_numbers_of_a_rank_that_does_not_come_are_told_to_be_missing(tmp_path, living, monkeypatch):
    monkeypatch.setattr(ranks, "LATE", 0.5)
    program = made(tmp_path, every=10)
    train(program, 15, SHOWN)
    while not all(rank.ranks._together.merged for rank in program):
        for rank in program:
            rank.ranks.tick(rank.step)
        time.sleep(0.01)
    train(program, 4, SHOWN)  # behind what is merged
    assert ended(program, 3.0) < 2.0
    (note,) = program[0].ranks.notes
    assert "rank 1 had not told the last numbers when rank 0 ended" in note
    run = open_run(tmp_path / "run")
    table = run.scalars("tokens")
    alone = [step for step, n in zip(table["step"].tolist(), table["tokens"].tolist(), strict=True) if n == 10.0]
    assert f"of steps {alone[0]} to {alone[-1]} are without them" in note
    assert [each["message"] for each in events(run, "ranks_apart")][-1] == note


def test_a_rank_that_trains_on_when_all_is_told_is_said_to_do_so(tmp_path, living, monkeypatch):
    monkeypatch.setattr(ranks, "LATE", 0.5)
    program = made(tmp_path, every=10)
    train(program, 10, SHOWN)
    while not all(rank.ranks._together.merged for rank in program):
        for rank in program:
            rank.ranks.tick(rank.step + 4)
        time.sleep(0.01)
    program[0].finish()
    program[1].begin()
    program[1].end(loss=1.0, tokens=10.0)
    program[1].finish()
    assert 11 not in open_run(tmp_path / "run").scalars("tokens")["step"].tolist()
    (note,) = program[0].ranks.notes
    assert "rank 1 had not ended when rank 0 did: loss, tokens and others of steps after that" in note


def test_a_step_that_was_agreed_on_and_not_gathered_has_the_rows_of_each(tmp_path, living, monkeypatch):
    monkeypatch.setattr(ranks, "LATE", 0.5)
    program = made(tmp_path)
    train(program, STEPS, SHOWN)
    ended(program, 3.0)
    run = open_run(tmp_path / "run")
    table = run.tensors(["numel"])
    found = sorted(zip(table["step"].tolist(), table["rank"].tolist(), table["numel"].tolist(), strict=True))
    steps = {step for step, *_ in found}
    assert steps == set(range(1, STEPS + 1))
    for step in steps:
        assert sum(numel for at, _, numel in found if at == step) == 512, step
    assert any("had not come by when this one ended" in note for note in program[0].ranks.notes)


def test_one_that_is_gone_is_not_waited_for(tmp_path, living, monkeypatch):
    monkeypatch.setattr(ranks, "LATE", 20.0)
    program = made(tmp_path, every=6)
    train(program, STEPS, SHOWN)
    program[1].writer.close("failed")
    program[1].ranks.forget()
    began = time.monotonic()
    program[0].finish()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("trains", [0, 1])
def test_one_that_trains_nothing_is_not_waited_for(tmp_path, living, monkeypatch, trains):
    monkeypatch.setattr(ranks, "LATE", 20.0)
    program = made(tmp_path)
    other = program[1 - trains]
    other.writer.close()
    (tmp_path / "run" / manifests.name(other.writer.rank)).unlink()  # without an optimizer it makes no part of a run
    for _ in range(STEPS):
        mine = program[trains]
        if mine.begin():
            mine.see("a:input", batch(trains, mine.step))
        mine.end(loss=float(mine.step), tokens=10.0)
    began = time.monotonic()
    mine.finish()
    assert time.monotonic() - began < 5
    assert mine.ranks.facts()["ranks"]["apart_steps"] == STEPS


def test_one_whose_part_is_on_another_machine_is_waited_for(tmp_path, living, monkeypatch):
    monkeypatch.setattr(ranks, "LATE", 1.0)
    program = made(tmp_path, every=6)
    train(program, STEPS, SHOWN)
    (tmp_path / "run" / manifests.name(1)).unlink()
    began = time.monotonic()
    program[0].finish()
    assert time.monotonic() - began > 1


def test_a_rank_that_makes_no_step_is_said_to_make_none(tmp_path, living, monkeypatch):
    """It evaluates, say: no number of its own is missing."""
    monkeypatch.setattr(ranks, "PATIENCE", 0.2)
    program = made(tmp_path, every=1)
    train(program[:1], 6, SHOWN)
    program[0].finish()
    (note,) = program[0].ranks.notes
    assert note.endswith("rank 1 made no step: loss, tokens and others of steps 1 to 6 are of the other ranks alone.")
