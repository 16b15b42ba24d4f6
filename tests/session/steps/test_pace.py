import json
from types import SimpleNamespace

import pytest
import torch
from tests.session.inline import followed
from torch import nn

import narrowgauge as ng
from narrowgauge.session import watching
from narrowgauge.session.recorder import Recorder
from narrowgauge.session.steps import laps, ledger
from narrowgauge.session.steps.pace import SETTLED, Pace


def test_nothing_is_said_of_too_few_steps_of_a_kind():
    pace = Pace()
    for recorded in (True, True, False, False, False):
        pace.add(1.0 + recorded, recorded=recorded)
    assert pace.facts() == {}
    assert pace.note("") == ""
    pace.add(2.0, recorded=True)
    assert pace.facts() == {"recorded_step_seconds": 2.0, "other_step_seconds": 1.0}


@pytest.mark.parametrize(
    ("seconds", "parameters", "short"),
    [
        (0.09, 10, True),
        (0.11, 10, False),
        (0.11, 400, False),
        (0.11, 500, True),
        (0.45, 2000, True),
        (0.6, 2000, False),
    ],
)
def test_steps_are_short_for_the_parameters_that_they_train(seconds, parameters, short):
    pace = Pace()
    pace.parameters = lambda: parameters
    for _ in range(SETTLED - 1):
        pace.add(seconds, recorded=False)
    assert not pace.short
    pace.add(seconds, recorded=False)
    assert pace.short is short


@pytest.mark.parametrize(("seconds", "short"), [(0.09, True), (0.11, False)])
def test_steps_are_short_without_what_falls_between_any_two(seconds, short):
    pace = Pace()
    for step in range(SETTLED - 1):
        pace.add_apart(seconds)
        assert not pace.short, step
    pace.add_apart(seconds)
    assert pace.short is short
    for _ in range(SETTLED):
        pace.add(0.2 - seconds, recorded=False)
    assert pace.short is not short


def test_a_first_step_that_compiles_is_not_what_is_told():
    pace = Pace()
    pace.add(100.0, recorded=False)
    pace.add(200.0, recorded=True)
    for step in range(30):
        pace.add(0.15 if step % 3 == 0 else 0.1, recorded=step % 3 == 0)
    assert pace.facts() == {"recorded_step_seconds": 0.15, "other_step_seconds": 0.1}


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        (1.4, ""),  # 4%
        (1.6, "6% slower: a recorded step took 1.6 times as long as another; with every = 50 it would be 1.2%."),
        (3.1, "21% slower: a recorded step took 3.1 times as long as another; with every = 200 it would be 1.1%."),
    ],
)
def test_what_costs_little_is_not_told_and_of_what_costs_more_which_cadence_would_not(recorded, told):
    pace = Pace()
    for step in range(200):
        pace.add(recorded if step % 10 == 0 else 1.0, recorded=step % 10 == 0)
    assert pace.note("") == (told and f"Watching made the program {told}")
    assert ("(since it rained)" in pace.note("since it rained")) is bool(told)


@pytest.mark.parametrize(("seconds", "told"), [(0.2, False), (0.3, True)])
def test_nothing_is_said_of_a_trial_that_lost_a_few_seconds(seconds, told):
    pace = Pace()
    for step in range(200):  # 20 recorded steps, each longer than another by `seconds`
        pace.add(0.1 + seconds if step % 10 == 0 else 0.1, recorded=step % 10 == 0)
    assert bool(pace.note("")) is told
    assert pace.facts()["recorded_step_seconds"] == 0.1 + seconds


@pytest.mark.parametrize("slow", [True, False])
def test_a_run_tells_by_how_much_recorded_steps_are_longer_and_an_evaluation_is_in_neither(slow, tmp_path, monkeypatch):
    clock = [0.0]
    for module in (laps, ledger):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ng.watch(out=tmp_path / "run", every=4):
        for step in range(1, 25):
            clock[0] += 300.0 if slow and step % 4 == 0 else 100.0
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 in (1, 2):  # so of two of three steps that are not recorded
                with torch.no_grad():
                    model(torch.randn(4, 16))
                clock[0] += 5000.0
    meta = json.loads((tmp_path / "run/run.json").read_text())["meta"]
    assert meta["watch"]["other_step_seconds"] == 100.0
    assert meta["watch"]["recorded_step_seconds"] == (300.0 if slow else 100.0)
    assert any(note.startswith("Watching made the program") for note in meta["notes"]) is slow


@pytest.fixture
def clock(seconds, monkeypatch):
    """What the ledger takes for the time, which passes only where a test says so, and while a step is put in order."""
    now, end_step = [0.0], Recorder.end_step

    def slowly(self):
        now[0] += seconds if self.collector.wants("") else 0.0
        end_step(self)

    for module in (laps, ledger):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Recorder, "end_step", slowly)
    return now


@pytest.mark.parametrize(("seconds", "clean"), [(40.0, 1.0), (100.0, 1.0), (101.0, 0.0)])
def test_what_a_recording_leaves_to_be_done_is_no_time_of_the_next_step(seconds, clean, tmp_path, clock):
    """Files are opened, tables packed when the next step begins: that is the recorded one's; if it was long, told."""
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ng.watch(out=tmp_path / "run", every=3):
        for _ in range(8):
            clock[0] += 100.0
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    table = ng.open_run(tmp_path / "run").scalars(["step_seconds", "clean"])
    recorded = 100.0 + seconds
    assert table["step_seconds"].tolist() == [100.0, 100.0, recorded, 100.0, 100.0, recorded, 100.0, 100.0]
    assert table["clean"].tolist() == [1.0, 1.0, 0.0, clean, 1.0, 0.0, clean, 1.0]


@pytest.mark.parametrize("begins", ["another model", "another part", "a capture"])
@pytest.mark.parametrize(("seconds", "clean"), [(40.0, 1.0), (101.0, 0.0)])
def test_nor_is_it_where_the_next_step_begins_with(begins, seconds, clean, tmp_path, clock):
    """What was recorded is put in order before another model is taken, or a graph captured: still at its own cost."""
    models = [nn.Sequential(nn.Linear(16, 16)) for _ in range(2)]
    with followed(tmp_path, every=3) as (session, writer):
        optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]
        for step in range(1, 7):
            which = step > 3 and begins == "another model"
            if step == 4 and begins == "another part":
                models[0].append(nn.Linear(16, 16))
                optimizers[0].add_param_group({"params": models[0][-1].parameters()})
            if step == 4 and begins == "a capture":
                session.steps.capture_begins()
            clock[0] += 100.0
            models[which](torch.randn(4, 16)).square().mean().backward()
            optimizers[which].step()
            optimizers[which].zero_grad()
    recorded = 100.0 + seconds
    assert list(writer.column("step_seconds").values())[:5] == [100.0, 100.0, recorded, 100.0, 100.0]
    assert list(writer.column("clean").values())[:5] == [1.0, 1.0, 0.0, clean, 1.0]


@pytest.mark.parametrize("seconds", [0.0])
@pytest.mark.parametrize("older", [True, False])
def test_the_first_step_begins_when_all_is_ready_for_it(older, tmp_path, clock, monkeypatch):
    """What beginning a watch takes, a walk over all objects say, is no time of a step."""

    def slowly(*args):
        clock[0] += 40.0
        return found(*args)

    found, model = watching._kind, nn.Linear(16, 16)
    monkeypatch.setattr(watching, "_kind", slowly)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3) if older else None
    with ng.watch(model, out=tmp_path / "run"):
        if optimizer is None:
            clock[0] += 1000.0  # the program is still preparing its data
            optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(2):
            clock[0] += 100.0
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
    assert ng.open_run(tmp_path / "run").scalars("step_seconds")["step_seconds"].tolist() == [100.0, 100.0]


def test_what_the_next_run_does_not_pay_is_no_reason_for_another_cadence():
    pace = Pace()
    for step in range(40):
        pace.add(70.0 if step % 10 == 0 else 1.0, recorded=step % 10 == 0)
    said = pace.note("", once="numba compiled the fast walk")
    assert said.endswith("times as long as another (numba compiled the fast walk); later runs pay less.")
    assert pace.note("it ran uncompiled", once="numba compiled").endswith(
        "(it ran uncompiled); with every = 5000 it would be 1.4%."
    )
