"""A program that ended before its first recorded step is told so, unless nothing was to be recorded in any case."""

import pytest
import torch
from tests.session import programs
from tests.session.inline import Writer
from tests.session.test_attach import follow
from torch import nn

import narrowgauge as ng

SAID = (
    "No tensor was recorded: the program made 3 steps, and tensors are recorded every {} steps. Write `--every 1` to "
    "record each step."
)
DUMP = ({"sites": ["0"], "steps": [[2, 2]], "roles": ["input"], "cap": 1 << 20},)


@pytest.fixture(autouse=True)
def _nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("narrowgauge.session.recorder.Dumper", Nothing)
    monkeypatch.setattr(Writer, "path", tmp_path, raising=False)


def told(tmp_path, **plan):
    """What a session says of it, which is among its notes as well."""
    session, writer = follow(tmp_path, programs.BASIC, "3", compiling=True, **{"judge": "current", **plan})
    facts = session.facts()
    assert facts["unmet"] == facts["not_found"] == []
    assert [note for note in facts["notes"] if "No tensor" in note] == list(filter(None, [facts["unrecorded"]]))
    assert not (facts["unrecorded"] and writer.tensors)
    return facts["unrecorded"]


@pytest.mark.parametrize(
    ("plan", "every"),
    [
        ({}, 10),
        ({"every": 4}, 4),
        ({"recipe": "current", "judge": ""}, 10),
        ({"recipe": "current", "watch": {"roles": ["output"]}}, 10),
        ({"watch": {"sites": ["0"], "skip": ["0:weight"]}}, 10),
        ({"dump": DUMP, "every": 5}, 5),
        ({"dump": DUMP, "watch": {"sites": ["0"]}}, 10),
        ({"dump": DUMP, "what_if": ("blockwise",)}, 10),
        ({"what_if": ("blockwise",), "seldom": True}, 10),
    ],
)
def test_too_few_steps_are_told_with_what_to_write(tmp_path, plan, every):
    assert told(tmp_path, **plan) == SAID.format(every)


class Nothing:
    """Dumps nothing."""

    missed = False

    def __init__(self, *_):
        pass

    def begin_step(self, step):
        return False

    def notes(self):
        return []

    def facts(self):
        return {}

    def end_step(self):
        pass

    flush = end_step


@pytest.mark.parametrize(
    "plan",
    [
        {"every": 3},
        {"every": 1},
        {"judge": ""},
        {"dump": DUMP},
        {"dump": DUMP, "what_if": ("blockwise",), "seldom": True},
        {"watch": {"skip": ["*"]}},
        {"watch": {"sites": ["!*"]}},
        {"watch": {"roles": ["output"]}},
        {"args": ("0",)},
    ],
    ids=str,
)
def test_where_something_or_nothing_in_any_case_was_to_be_recorded_nothing_is_told(tmp_path, plan):
    if plan.get("args") == ("0",):
        session, _ = follow(tmp_path, programs.BASIC, "0", compiling=True, judge="current")
        assert session.facts()["unrecorded"] == ""
    else:
        assert told(tmp_path, **plan) == ""


def test_steps_of_ranges_are_told_as_settings(tmp_path):
    session, _ = follow(tmp_path, programs.BASIC, "3", compiling=True, judge="current", watch={"steps": [[1, None]]})
    facts = session.facts()
    assert facts["unrecorded"] == ""
    assert facts["unmet"][0].startswith("watch.steps: nothing was recorded; the program made 3 steps")


def test_a_comparison_chooses_its_cadence_itself(tmp_path):
    session, _ = follow(tmp_path, programs.BASIC, "3", recipe="current")
    assert session.facts()["unrecorded"] == ""


def test_a_watch_in_the_process_is_told_its_own_word(tmp_path):
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "a") as watching:
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
    notes = ng.open_run(watching.folder).meta["notes"]
    said = (
        "No tensor was recorded: the program made 1 step, and tensors are recorded every 10 steps. Write `every=1` to "
        "record each step."
    )
    assert notes.count(said) == 1


UNJUDGED = (
    "what_if is empty, so no recipe quantizes layers that narrowgauge did not convert: this run has nothing of {}. "
    'Write what_if = ["current"], or leave it out.'
)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, None),
        ({"watch": {"ranks": True}}, None),
        ({"dump": DUMP}, "dump"),
        ({"watch": {"sites": ["0"]}}, "watch.sites"),
        ({"watch": {"sites": ["nowhere"], "metrics": ["amax"], "steps": [[1, None]]}, "dump": 2 * DUMP}, "all"),
        ({"dump": DUMP, "judge": "current"}, None),
        ({"dump": DUMP, "recipe": "current"}, None),
    ],
)
def test_what_nobody_quantizes_cannot_be_had_and_is_told_where_it_was_asked_for(tmp_path, monkeypatch, plan, said):
    monkeypatch.undo()
    monkeypatch.setattr(Writer, "path", tmp_path, raising=False)
    session, _ = follow(tmp_path, programs.BASIC, "3", compiling=True, **{"every": 1, "judge": "", **plan})
    wanted = {"all": "watch.steps, watch.sites, watch.metrics and dump"}.get(said, said)
    assert session.facts()["unmet"] == ([UNJUDGED.format(wanted)] if said else [])
