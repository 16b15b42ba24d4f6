"""Ranks that take long to meet, or never do: training on a CPU goes on meanwhile, and no row is lost or kept twice."""

import threading
import time

import pytest
import torch.distributed as dist
from tests.session.ranks.test_ranks import batch, finished, made, train

from narrowgauge.observe.store import open_run
from narrowgauge.session.ranks import flights, group, ranks
from narrowgauge.session.ranks.agreement import LAG

STEPS = 12


@pytest.fixture
def meet(monkeypatch):
    """Ranks meet when this event is set."""
    event = threading.Event()

    class Late(dist.ProcessGroupGloo):
        def __init__(self, *args):
            event.wait(60)
            super().__init__(*args)

    monkeypatch.setattr(dist, "ProcessGroupGloo", Late)
    monkeypatch.setattr(ranks, "LATE", 0.3)
    yield event
    event.set()


def numel(folder, rank=0):
    table = open_run(folder / "run").tensors(["numel"], sites=["a:input"])
    rows = zip(table["step"].tolist(), table["rank"].tolist(), table["numel"].tolist(), strict=True)
    return [(step, numel) for step, whose, numel in rows if whose == rank]


def tokens(folder):
    """Of each rank, by step."""
    tables = [open_run(folder / "run").scalars("tokens", rank=rank) for rank in range(2)]
    return [dict(zip(table["step"].tolist(), table["tokens"].tolist(), strict=True)) for table in tables]


def trained(tmp_path, steps=STEPS):
    program = made(tmp_path)
    began = time.monotonic()
    train(program, steps, lambda rank, step: {"a:input": batch(rank, step)})
    assert time.monotonic() - began < 15  # nobody waited for the meeting
    return program


def test_what_ranks_agreed_on_before_they_met_is_merged_when_they_have(tmp_path, meet):
    program = trained(tmp_path)
    meet.set()
    finished(program, tmp_path)
    assert numel(tmp_path) == [(step, 512.0) for step in range(1, STEPS + 1)]
    assert numel(tmp_path, rank=1) == []
    assert program[0].ranks.facts()["ranks"]["merged_steps"] == STEPS


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.0, 0.0, "not all of them came"),
        (30.0, 0.2, "not all of them came"),
        (30.0, 30.0, "had not met when the program"),
    ],
)
def test_ranks_that_never_meet_leave_each_its_own_rows(tmp_path, meet, monkeypatch, before, after, said):
    monkeypatch.setattr(group, "MEETING", before)
    program = trained(tmp_path)
    monkeypatch.setattr(group, "MEETING", after)
    time.sleep(0.3)
    train(program, 1, lambda rank, step: {"a:input": batch(rank, step)})
    finished(program, tmp_path)
    assert [each.ranks.facts()["ranks"]["apart_steps"] for each in program] == [STEPS + 1] * 2
    for rank in range(2):
        assert numel(tmp_path, rank) == [(step, 256.0) for step in range(1, STEPS + 2)]
    assert any(said in note for note in program[0].ranks.notes)


def test_a_rank_that_records_its_first_step_long_after_another_is_waited_for(tmp_path, meet, monkeypatch):
    """The limit is one for meeting once all have come, however long this rank had been there before."""
    monkeypatch.setattr(group, "MEETING", 0.5)
    program = made(tmp_path)
    train(program, 1, lambda rank, step: {"a:input": batch(rank, step)})
    time.sleep(0.8)
    train(program, LAG, lambda rank, step: {"a:input": batch(rank, step)})
    meet.set()
    finished(program, tmp_path)
    assert numel(tmp_path) == [(step, 512.0) for step in range(1, LAG + 2)]


def met(program, meet):
    meet.set()
    for rank in program:
        rank.ranks._together._flights.group._meeting.join(30)


def test_rows_of_a_gather_that_cannot_be_launched_are_this_ranks_own(tmp_path, meet, monkeypatch):
    program = trained(tmp_path)
    monkeypatch.setattr(group.Group, "gather", lambda self, table: 1 / 0)
    met(program, meet)
    train(program, 1, lambda rank, step: {"a:input": batch(rank, step)})
    finished(program, tmp_path)
    for rank in range(2):
        assert numel(tmp_path, rank) == [(step, 256.0) for step in range(1, STEPS + 2)]
    assert [each.ranks.facts()["ranks"]["apart_steps"] for each in program] == [STEPS + 1] * 2


@pytest.mark.parametrize("whose", [(0, 1), (1,)])
def test_scalars_of_a_gather_that_cannot_be_launched_are_in_a_row(tmp_path, meet, monkeypatch, whose):
    meet.set()
    program, gather = made(tmp_path), group.Group.gather
    train(program, STEPS, lambda rank, step: {"a:input": batch(rank, step)})
    failing = lambda self, table: 1 / 0 if self._rank in whose else gather(self, table)  # noqa: E731
    monkeypatch.setattr(group.Group, "gather", failing)
    train(program, 3, lambda rank, step: {"a:input": batch(rank, step)})
    finished(program, tmp_path)
    mine, others = tokens(tmp_path)
    for step in range(1, STEPS + 4):  # in two, if one rank saw a gather end and the other did not
        assert mine[step] == 20.0 or (mine[step], others.get(step)) == (10.0, 10.0), step


def test_what_others_told_is_merged_though_rank_0_gives_up_as_the_program_ends(tmp_path, meet, monkeypatch):
    meet.set()
    program, gather = made(tmp_path), group.Group.gather
    train(program, STEPS, lambda rank, step: {"a:input": batch(rank, step)})
    failing = lambda self, table: gather(self, table) if self._rank else 1 / 0  # noqa: E731
    monkeypatch.setattr(group.Group, "gather", failing)
    finished(program, tmp_path)
    mine, others = tokens(tmp_path)
    for step in range(1, STEPS + 1):
        assert mine[step] == 20.0 or (mine[step], others.get(step)) == (10.0, 10.0), step


def test_a_scalar_that_only_another_rank_has_is_written_though_rank_0_gives_up(tmp_path, meet, monkeypatch):
    meet.set()
    first, second = program = made(tmp_path)
    late = []
    for step in range(1, STEPS + 1):
        for r, rank in enumerate(program):
            if rank.begin():
                rank.see("a:input", batch(r, step))
            rank.end()
        second.ranks.add_scalars(step, loss=float(step), tokens=10.0)
        late.append(step)
        if len(late) > 3:
            first.ranks.add_scalars(late.pop(0), tokens=10.0)
    monkeypatch.setattr(first.ranks._together._agreement, "post", lambda *args: 1 / 0)
    train(program, 3, lambda rank, step: {"a:input": batch(rank, step)})
    for step in late:
        first.ranks.add_scalars(step, tokens=10.0)
    finished(program, tmp_path)
    told = set()
    for rank in range(2):
        told |= set(open_run(tmp_path / "run").scalars("loss", rank=rank)["step"].tolist())
    assert told >= set(range(1, STEPS + 1))


def test_scalars_of_gathers_that_never_end_are_their_ranks_own(tmp_path, meet, monkeypatch):
    meet.set()
    monkeypatch.setattr(group.Gather, "done", lambda self: False)
    program = trained(tmp_path)
    finished(program, tmp_path)
    assert all(each.ranks.facts()["ranks"]["merged_steps"] == 0 for each in program)
    mine, others = tokens(tmp_path)
    for step in range(1, STEPS + 1):
        assert mine[step] == 20.0 or (mine[step], others.get(step)) == (10.0, 10.0), step


def test_gathers_that_wait_are_not_joined_once_a_rank_has_given_up(tmp_path, meet, monkeypatch):
    started = []
    monkeypatch.setattr(group.Group, "gather", lambda self, table: started.append(table))
    program = trained(tmp_path)
    program[1].ranks._together._agreement.give_up()
    met(program, meet)
    train(program, 1, lambda rank, step: {"a:input": batch(rank, step)})
    finished(program, tmp_path)
    assert started == []
    assert any("another rank has given up" in note for note in program[0].ranks.notes)
    assert numel(tmp_path) == [(step, 256.0) for step in range(1, STEPS + 2)]


def test_with_much_that_waits_meeting_is_waited_for(tmp_path, meet, monkeypatch):
    monkeypatch.setattr(flights, "WAITING_BYTES", 0)
    began = time.monotonic()
    threading.Timer(2.0, meet.set).start()
    program = made(tmp_path)
    train(program, 1 + LAG, lambda rank, step: {"a:input": batch(rank, step)})
    assert time.monotonic() - began >= 2.0
    finished(program, tmp_path)
    assert numel(tmp_path) == [(step, 512.0) for step in range(1, LAG + 2)]


def test_meeting_has_the_spare_seconds_once_for_all_steps_that_wait_for_it(tmp_path, meet, monkeypatch):
    monkeypatch.setattr(flights, "WAITING_BYTES", 0)
    monkeypatch.setattr(ranks, "LATE", 1.0)
    asked, ready = [], group.Group.ready

    def timed(self, seconds, *, wait=False):
        asked.append(seconds)
        return ready(self, seconds, wait=wait)

    monkeypatch.setattr(group.Group, "ready", timed)
    program = made(tmp_path)
    train(program, LAG, lambda rank, step: {"a:input": batch(rank, step)})
    assert asked == []
    program[0].finish()
    assert asked[0] == pytest.approx(1.0, abs=0.1)
    assert len(asked) > 1
    assert max(asked[1:]) < 0.1
    meet.set()
    program[1].finish()
