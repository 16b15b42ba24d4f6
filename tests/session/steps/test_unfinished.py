"""A program that ends within a step: steps, scalars and rows of tensors agree, and a note tells what is in none."""

from contextlib import nullcontext

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks

import narrowgauge as ng

SETTINGS = """
[watch]
what_if = ["current", "delayed"]
[[dump]]
sites = ["0:input"]
steps = "1-"
"""


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.ones(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("backwards", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_it_leaves_no_rows_unless_it_failed(tmp_path, backwards, fails):
    (tmp_path / "narrowgauge.toml").write_text(SETTINGS)
    model, optimizer = made()
    ends = pytest.raises(ValueError, match="no more data") if fails else nullcontext()
    with ends, ng.watch(model, tmp_path / "a", every=1, config=tmp_path / "narrowgauge.toml"):
        train(model, optimizer, 3)
        for _ in range(max(backwards, 1)):
            y = model(torch.ones(8, 16)).square().mean()
            if backwards:
                y.backward()
        if fails:
            raise ValueError("no more data")
    run = ng.open_run(tmp_path / "a")
    assert run.meta["steps"] == 3
    assert run.scalars("loss")["step"].tolist() == [1, 2, 3]
    for folder in ("a", "a/what_if/delayed"):
        table = ng.open_run(tmp_path / folder).tensors()
        assert sorted(set(table["step"].tolist())) == ([1, 2, 3, 4] if fails else [1, 2, 3])
        assert "1:grad_output" in table["site"].tolist()
    (note,) = [note for note in run.meta["notes"] if "no optimizer step" in note]
    assert note == (
        f"What the program called with gradients on after step 3 led to no optimizer step (backward: {backwards} "
        f"time{'s' * (backwards != 1)}); {'its layers have rows, as far as they came' if fails else 'it is in no row'}."
    )
    assert len(list((tmp_path / "a" / "dumps").iterdir())) == 4  # of what a program failed at, perhaps


def test_a_step_that_was_not_recorded_is_in_no_row_also_where_the_program_failed_in_it(tmp_path):
    model, optimizer = made()
    ends = pytest.raises(ValueError, match="no more data")
    with ends, ng.watch(model, tmp_path / "a", every=2):
        train(model, optimizer, 2)
        model(torch.ones(8, 16)).square().mean().backward()
        raise ValueError("no more data")
    run = ng.open_run(tmp_path / "a")
    assert set(run.tensors()["step"].tolist()) == {2}
    (note,) = [note for note in run.meta["notes"] if "no optimizer step" in note]
    assert note.endswith("led to no optimizer step (backward: 1 time); it is in no row.")


def test_a_program_that_ends_after_a_step_has_no_such_note(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        train(*made(), 3)
    assert sorted({step for step, _, _ in writer.tensors}) == [1, 2, 3]
    assert session.facts()["notes"] == []


def test_without_any_step_there_are_no_rows_at_all(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model, _ = made()
        model(torch.ones(8, 16)).sum().backward()
    assert (writer.tensors, writer.scalars, session.facts()["steps"]) == ([], {}, 0)
    assert session.facts()["not_found"] == ["No step was seen: no torch.optim optimizer stepped."]
    assert session.facts()["notes"] == []


@pytest.mark.parametrize("steps", [0, 2])
def test_an_evaluation_after_microbatches_that_were_left_over_is_the_last_steps(tmp_path, steps):
    """As of an epoch whose batches are no multiple of those of a step."""
    with followed(tmp_path) as (_, writer):
        model, optimizer = made()
        train(model, optimizer, steps)
        model(torch.ones(8, 16)).square().mean().backward()
        with torch.no_grad():
            value = F.mse_loss(model(torch.ones(4, 16)), torch.ones(4, 16)).item()
    assert writer.column("eval_loss") == {steps: pytest.approx(value)}


def test_a_program_that_clears_torch_s_optimizer_hooks_is_told_what_is_missing(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model, optimizer = made()
        train(model, optimizer, 2)
        hooks = dict(_global_optimizer_post_hooks)
        _global_optimizer_post_hooks.clear()
        train(model, optimizer, 2)
        session.finish()
        _global_optimizer_post_hooks.update(hooks)
    assert sorted(writer.scalars) == [1, 2]
    told = (
        "The program cleared torch's global optimizer hooks, ours among them: what stepped after step 2 was not heard."
    )
    assert [note for note in session.facts()["notes"] if "step 2" in note] == [told]
