"""Lines of several steps become rows at once, in order, and none waits where others wait for it."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from tests.session.tensors.far_away import Device

from narrowgauge.session.steps import rows
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.rows import TOGETHER, StepRows


class Writer:
    def __init__(self):
        self.told = []

    def add_scalars(self, step, **values):
        self.told.append((step, values))

    @property
    def steps(self):
        return [step for step, _ in self.told]


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(rows, "time", clock)
    return clock


def line(step, *, recorded=False, disturbed=False, **scalars):
    loss, tokens = scalars.pop("loss", None), scalars.pop("tokens", 0)
    scalars = {"step_seconds": 0.5, **scalars}
    return Line(step, loss, tokens=tokens, scalars=scalars, recorded=recorded, disturbed=disturbed)


def test_lines_wait_for_company_and_keep_their_order(clock):
    writer = Writer()
    found = StepRows(Writer(), lambda: False, writer)
    for step in range(1, TOGETHER):
        found.add(line(step))
        clock.now += rows.PATIENCE / 100
    assert writer.told == []
    found.add(line(TOGETHER))
    assert writer.steps == list(range(1, TOGETHER + 1))


@pytest.mark.parametrize("why", ["recorded", "time", "on a device"])
def test_none_waits_long(clock, why):
    writer = Writer()
    found = StepRows(Writer(), lambda: False, writer)
    found.add(line(1))
    assert writer.told == []
    if why == "time":
        clock.now += rows.PATIENCE + 0.01
    event = SimpleNamespace(elapsed_time=lambda end: 500.0, query=lambda: True)
    second = line(2, recorded=why == "recorded")
    second.events = (event, event) if why == "on a device" else None
    found.add(second)
    assert writer.steps == [1, 2]
    found.add(line(3))
    assert writer.steps == [1, 2]


def test_a_row_whose_numbers_are_known_waits_for_its_time(clock):
    class Event:
        passed = False

        def elapsed_time(self, end):
            assert end.passed
            return 250.0

        def query(self):
            return self.passed

    writer, event = Writer(), Event()
    found = StepRows(Writer(), lambda: False, writer)
    first = line(1)
    first.events = (event, event)
    found.add(first)
    assert writer.told == []
    event.passed = True
    found.add(line(2))
    found.finish()
    assert writer.steps == [1, 2]
    assert writer.told[0][1]["step_seconds"] == 0.25


def test_nor_is_it_told_where_its_numbers_came_by_another_stream(clock, monkeypatch):
    device, passed, writer = Device(monkeypatch), [], Writer()
    found = StepRows(Writer(), lambda: False, writer)
    first = line(1, loss=torch.tensor(0.5))
    event = SimpleNamespace(elapsed_time=lambda end: 250.0, query=lambda: bool(passed))
    first.events, device.passed = (event, event), True
    found.add(first)
    assert writer.told == []
    passed.append(True)
    found.add(line(2, recorded=True))
    assert writer.steps == [1, 2]


def test_sixteen_brief_rows_of_a_device_take_their_way_at_once(clock, monkeypatch):
    device, writer = Device(monkeypatch), Writer()
    found = StepRows(Writer(), lambda: False, writer)
    for step in range(1, TOGETHER + 1):
        assert device.copied == []
        brief = line(step, loss=torch.tensor(float(step)))
        brief.brief = True
        found.hold(brief)
    assert device.copied == [TOGETHER]
    assert writer.told == []
    found.hold(line(TOGETHER + 1, loss=torch.tensor(0.5)))
    device.passed = True
    found.finish()
    assert device.copied == [TOGETHER, 1]
    assert [row["loss"] for _, row in writer.told] == [*map(float, range(1, TOGETHER + 1)), 0.5]


def test_where_ranks_merge_none_waits_and_those_of_before_are_not_merged(clock):
    alone, merged, others = Writer(), Writer(), []
    found = StepRows(merged, lambda: bool(others), alone)
    found.add(line(1))
    others.append(1)
    found.add(line(2))
    found.add(line(3))
    assert (alone.steps, merged.steps) == ([1], [2, 3])


def among_ranks():
    """Rows of a rank whose first step is told, and the taker of what is merged."""
    own, merged, others = Writer(), Writer(), []
    found = StepRows(merged, lambda: bool(others), own)
    found.hold(brief(1))
    others.append(1)
    found.add(line(2))
    assert (own.steps, merged.steps) == ([1], [2])
    return found, merged


def brief(step, **scalars):
    return Line(step, 1.0, scalars={"step_seconds": 0.5, **scalars}, brief=True)


@pytest.mark.parametrize("asks", ["tell", "gather", "time", "many"])
def test_brief_rows_wait_where_ranks_merge_and_the_last_for_its_evaluation(clock, asks):
    found, merged = among_ranks()
    last = 3 + TOGETHER if asks == "many" else 5
    for step in range(3, last):
        found.hold(brief(step))
        assert merged.steps == ([2] if step < last - 1 or asks in ("tell", "gather", "time") else list(range(2, step)))
    clock.now += (rows.PATIENCE + 0.01) * (asks == "time")
    if asks in ("tell", "gather"):
        getattr(found, asks)()
    found.hold(brief(last))
    assert merged.steps == list(range(2, last - (asks != "time")))
    found.tell()
    assert merged.steps == list(range(2, last))
    found.add_to_earlier(last, Writer(), eval_loss=torch.tensor(3.0))
    found.add(line(last + 1))
    assert merged.steps == list(range(2, last + 2))
    assert merged.told[-2] == (
        last,
        {"step_seconds": 0.5, "eval_loss": 3.0, "loss": 1.0, "clean": 1.0, "nonfinite": 0.0},
    )
    assert "microbatches" in merged.told[-1][1]


def test_the_last_brief_row_is_told_as_the_next_step_opens_or_none_follows(clock):
    found, merged = among_ranks()
    found.hold(brief(3))
    found.turn([0])
    assert merged.steps == [2, 3]
    found.hold(brief(4))
    found.finish()
    assert merged.steps == [2, 3, 4]


def test_what_belongs_to_a_brief_row_that_was_told_comes_after_it(clock):
    found, merged = among_ranks()
    writer = Writer()
    found.hold(brief(3))
    found.hold(brief(4))
    found.add_to_earlier(3, writer, eval_loss=torch.tensor(3.0))
    assert (merged.steps, writer.told) == ([2, 3], [(3, {"eval_loss": 3.0})])


def test_the_writers_thread_gathers_what_is_held_back(clock, monkeypatch):
    writer = Writer()
    found = StepRows(Writer(), lambda: False, writer)
    found.add(line(1, loss=torch.tensor(2.0)))
    found.gather()
    assert writer.steps == [1]
    device = Device(monkeypatch)
    found.add(line(2, loss=torch.tensor(3.0)))
    found.tell()
    found.add(line(3))
    found.gather()
    device.passed = True
    assert writer.steps == [1]
    found.finish()
    assert writer.steps == [1, 2, 3]


def test_a_line_that_fails_costs_itself_and_is_told(clock):
    writer = Writer()
    found = StepRows(Writer(), lambda: False, writer)
    for step in range(1, 5):
        found.add(line(step, loss=torch.ones(2) if step == 2 else torch.tensor(1.0)))
    found.gather()
    assert writer.steps == [1]
    with pytest.raises(ValueError, match="only one element"):
        found.add(line(5))
    found.finish()
    assert writer.steps == [1, 3, 4, 5]


def test_an_interrupt_costs_one_line(clock):
    class Interrupted(Writer):
        def add_scalars(self, step, **values):
            if step == 2:
                raise KeyboardInterrupt
            super().add_scalars(step, **values)

    writer = Interrupted()
    found = StepRows(Writer(), lambda: False, writer)
    for step in range(1, 5):
        found.add(line(step))
    with pytest.raises(KeyboardInterrupt):
        found.tell()
    found.finish()
    assert writer.steps == [1, 3, 4]


@pytest.mark.parametrize("asks", ["gather", "add"])
def test_rows_are_left_to_the_thread_that_gives_some_away(clock, monkeypatch, asks):
    monkeypatch.setattr(rows, "LOCK_SECONDS", 0.01)
    began, goes_on = threading.Event(), threading.Event()

    class Slow(Writer):
        def add_scalars(self, step, **values):
            if step == 1:
                began.set()
                assert goes_on.wait(10)
            super().add_scalars(step, **values)

    writer = Slow()
    found = StepRows(Writer(), lambda: False, writer)
    found.add(line(1))
    found.add(line(2))
    gives = threading.Thread(target=found.tell)
    gives.start()
    assert began.wait(10)
    if asks == "gather":
        found.gather()
    else:
        found.add(line(3, recorded=True))
    goes_on.set()
    gives.join()
    found.finish()
    assert writer.steps == ([1, 2] if asks == "gather" else [1, 2, 3])


def test_nobody_waits_for_a_thread_that_was_interrupted_while_it_told(clock, monkeypatch):
    monkeypatch.setattr(rows, "LOCK_SECONDS", 0.01)
    writer = Writer()
    found = StepRows(Writer(), lambda: False, writer)
    found.add(line(1))
    held = threading.Thread(target=found._lock.acquire)
    held.start()
    held.join()
    found.finish()
    assert writer.steps == [1]


def test_what_belongs_to_an_earlier_step_comes_after_its_row(clock):
    writer = Writer()
    found = StepRows(Writer(), lambda: False, writer)
    found.add(line(1, loss=torch.tensor(2.0)))
    found.add_to_earlier(1, writer, eval_loss=torch.tensor(3.0))
    first = {"step_seconds": 0.5, "loss": 2.0, "microbatches": 0.0, "clean": 1.0, "nonfinite": 0.0}
    assert writer.told == [(1, first), (1, {"eval_loss": 3.0})]


def test_at_the_end_all_is_written_and_counted(clock):
    writer = Writer()
    found = StepRows(Writer(), lambda: False, writer)
    found.add(line(1, tokens=10, loss=torch.tensor(math.nan)))
    found.add(line(2, skipped=1.0, grad_norm=float("inf"), loss=torch.tensor(1.5)))
    found.add(line(3, skipped=0.0, loss=torch.tensor(1.0), disturbed=True))
    assert math.isnan(found.last_loss)
    found.finish()
    assert writer.steps == [1, 2, 3]
    assert writer.told[0][1]["tokens_per_second"] == 20.0
    assert "skipped" not in writer.told[2][1]
    assert (found.nonfinite_steps, found.skipped_steps, found.last_loss) == (1, 1, 1.0)
    assert found.pace._steps == {True: 0, False: 2}  # the disturbed one tells nothing of a step's time
    found.finish()
    assert writer.steps == [1, 2, 3]
