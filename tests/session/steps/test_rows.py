"""Lines of several steps become rows at once, in order, and none waits where others wait for it."""

import math

import pytest
import torch

from narrowgauge.session.steps import rows
from narrowgauge.session.steps.rows import TOGETHER, Closed, StepRows


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
    return Closed(step, {"step_seconds": 0.5, **scalars}, recorded, disturbed, None)


def test_lines_wait_for_company_and_keep_their_order(clock):
    writer = Writer()
    found = StepRows(writer, lambda: False)
    for step in range(1, TOGETHER):
        found.add(line(step))
        clock.now += rows.PATIENCE / 100
    assert writer.told == []
    found.add(line(TOGETHER))
    assert writer.steps == list(range(1, TOGETHER + 1))


@pytest.mark.parametrize("why", ["recorded", "others wait", "time"])
def test_none_waits_long(clock, why):
    writer, others = Writer(), []
    found = StepRows(writer, lambda: bool(others))
    found.add(line(1))
    assert writer.told == []
    if why == "time":
        clock.now += rows.PATIENCE + 0.01
    elif why == "others wait":
        others.append(1)
    found.add(line(2, recorded=why == "recorded"))
    assert writer.steps == [1, 2]
    found.add(line(3))
    assert (3 in writer.steps) == (why == "others wait")


def test_what_belongs_to_an_earlier_step_comes_after_its_row(clock):
    writer = Writer()
    found = StepRows(writer, lambda: False)
    found.add(line(1, loss=torch.tensor(2.0)))
    found.add_to_earlier(1, writer, eval_loss=torch.tensor(3.0))
    assert writer.told == [(1, {"step_seconds": 0.5, "loss": 2.0, "nonfinite": 0.0}), (1, {"eval_loss": 3.0})]


def test_at_the_end_all_is_written_and_counted(clock):
    writer = Writer()
    found = StepRows(writer, lambda: False)
    found.add(line(1, tokens=10, loss=float("nan")))
    found.add(line(2, skipped=1.0, grad_norm=float("inf"), loss=1.5))
    found.add(line(3, skipped=0.0, loss=1.0, disturbed=True))
    assert math.isnan(found.last_loss)
    found.finish()
    assert writer.steps == [1, 2, 3]
    assert writer.told[0][1]["tokens_per_second"] == 20.0
    assert "skipped" not in writer.told[2][1]
    assert (found.nonfinite_steps, found.skipped_steps, found.last_loss) == (1, 1, 1.0)
    assert found.pace._steps == {True: 0, False: 2}  # the disturbed one tells nothing of a step's time
    found.finish()
    assert writer.steps == [1, 2, 3]
