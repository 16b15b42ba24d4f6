"""What was compiled before a watch runs as it did; all that runs outside of it is watched, with the right numbers."""

import json
import sys

import numpy as np
import pytest
import torch
from tests.session.doors import compiled_before
from tests.session.sites.recorded import COLUMNS, check, counted

import narrowgauge as ng

LAYERS = {"first.up", "first.down", "second.up", "second.down", "head"}
STEPS, EVERY = compiled_before.STEPS, compiled_before.EVERY
NOTE = "What was compiled before the watch began is not seen inside"


@pytest.fixture
def program(warm_python, tmp_path):
    """A program, in a process of its own: what it said, its run, and whether that told of what is not seen."""

    def run(case):
        words = [sys.executable, compiled_before.__file__, case, str(tmp_path)]
        done = warm_python.run(words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said, run = json.loads(done.stdout.splitlines()[-1]), ng.open_run(tmp_path / "run")
        assert said["watched"]["losses"] == pytest.approx(said["alone"]["losses"], rel=1e-6)
        assert run.meta["steps"] == STEPS
        return said["alone"], said["watched"], run, any(note.startswith(NOTE) for note in run.meta["notes"])

    return run


def check_rows(run, layers):
    """Each recorded step has these layers and no other, with the numbers by hand."""
    table = run.tensors(COLUMNS)
    hand = torch.load(run.path.parent / "hand.pt")
    found = list(zip(table["step"].tolist(), table["site"].tolist(), strict=True))
    assert set(found) == {key for key in hand if key[1].rpartition(":")[0] in layers}
    assert len(found) == len(layers) * 3 * STEPS // EVERY
    for at, key in enumerate(found):
        want = counted(hand[key], key[1].rpartition(":")[2])
        check({name: np.asarray(table[name])[at] for name in COLUMNS}, want)


@pytest.mark.parametrize("case", ["another function", "another model", "activation", "loss"])
def test_a_model_that_runs_eagerly_is_watched_in_full(program, case):
    alone, watched, run, told = program(case)
    check_rows(run, LAYERS)
    assert not told
    counts = {name: watched[name] for name in ("runs", "graphs", "frames", "breaks")}
    assert counts == {name: alone[name] for name in counts}
    assert counts["runs"] == (0 if case.startswith("another") else STEPS)


@pytest.mark.parametrize("case", ["step", "own update"])
def test_an_update_stays_compiled_and_its_model_is_watched_in_full(program, case):
    """Its hooks come once, where there were none."""
    alone, watched, run, told = program(case)
    check_rows(run, LAYERS)
    assert not told
    assert (watched["runs"], watched["graphs"]) == (STEPS, alone["graphs"] + (case == "own update"))


@pytest.mark.parametrize(
    ("case", "seen"), [("part", {"first.up", "first.down", "head"}), ("forward", set()), ("function", set())]
)
def test_what_runs_in_a_function_compiled_before_is_left_alone_and_that_is_told(program, case, seen):
    """A new shape comes in a recorded step: what torch then compiles has nothing of ours either."""
    alone, watched, run, told = program(case)
    if seen:
        check_rows(run, seen)
    else:
        assert not run.sites
    assert told
    counts = {name: watched[name] for name in ("runs", "graphs", "frames", "breaks")}
    assert counts == {name: alone[name] for name in counts}
    assert (counts["runs"], counts["breaks"]) == (STEPS, 0)


@pytest.mark.parametrize("case", ["model", "model in place", "block", "block in place", "model in the watch"])
def test_compiled_modules_are_seen_whenever_they_were_compiled(program, case):
    """Recorded steps run them uncompiled; no graph is made for that, and no break."""
    alone, watched, run, told = program(case)
    check_rows(run, LAYERS)
    assert not told
    assert (watched["breaks"], alone["breaks"]) == (0, 0)
    assert watched["graphs"] <= alone["graphs"]


@pytest.mark.parametrize("case", ["loss and model in the watch", "own update and model in the watch"])
def test_what_is_older_stays_compiled_beside_what_is_not(program, case):
    alone, watched, run, told = program(case)
    check_rows(run, LAYERS)
    assert not told
    assert watched["runs"] == alone["runs"] == STEPS
    assert watched["graphs"] <= alone["graphs"]


def test_what_is_older_inside_of_what_is_not_has_no_graph_of_its_own_in_recorded_steps(program):
    """In the others it lies in the graph around it."""
    alone, watched, run, told = program("activation and model in the watch")
    check_rows(run, LAYERS)
    assert not told
    assert watched["runs"] == alone["runs"] == 0
    assert watched["graphs"] <= alone["graphs"]
