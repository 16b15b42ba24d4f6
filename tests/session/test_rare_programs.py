"""Programs that go torch's less trodden ways: none is disturbed, and the run has them as they are."""

import copy
import io
from itertools import pairwise

import pytest
import torch
from tests.session.inline import followed
from torch import nn

OPERANDS = ("input", "weight", "grad_output")


def stack(*sizes):
    torch.manual_seed(0)
    layers = [layer for k, n in pairwise(sizes) for layer in (nn.Linear(k, n), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def data(step, rows=8):
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, call=None, steps=(1, 2, 3)):
    for step in steps:
        loss = (call or model)(data(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def rows(writer):
    """(step, site) -> its columns."""
    return {
        (step, site): {name: float(values[n]) for name, values in columns.items() if values.ndim == 1}
        for step, sites, columns in writer.tensors
        for n, site in enumerate(sites)
    }


def operands(writer, step):
    return {site for at, site in rows(writer) if at == step and site.rpartition(":")[2] in OPERANDS}


# ---------------------------------------------------------------------------------------------- what is made, and when


@pytest.mark.parametrize("rehearsed", [False, True])
def test_lazy_modules_are_followed_from_the_call_that_makes_them(tmp_path, rehearsed):
    with followed(tmp_path, every=1, judge="current", compiling=True) as (session, writer):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(24), nn.Tanh(), nn.Linear(24, 24), nn.LazyLinear(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if rehearsed:
            model(data(0))
        train(model, optimizer)
    facts = session.facts()
    assert not [note for note in facts["notes"] if "failed" in note or "Not seen" in note]
    assert (facts["steps"], facts["models"]) == (3, 1)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert operands(writer, 3) == {f"{name}:{role}" for name in ("0", "2", "3") for role in OPERANDS}
    assert rows(writer)[3, "0:weight"]["numel"] == 24 * 16


def test_an_error_of_ours_when_an_optimizer_is_made_stays_with_us(tmp_path, monkeypatch):
    with followed(tmp_path) as (session, _):
        monkeypatch.setattr(session.optimizers, "add", None)
        assert torch.optim.SGD(stack(16, 16).parameters(), lr=0.1).param_groups
    [note] = session.hearing.notes
    assert note.startswith("Following the program failed in optimizer_made: TypeError")


def through_a_file(both):
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, through_a_file])
def test_a_model_that_is_copied_with_its_optimizer_is_followed(tmp_path, again):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = stack(16, 32, 16)
        both = model, torch.optim.Adam(model.parameters())
        train(*both)
        both[1].load_state_dict(both[1].state_dict())
        assert session.optimizers_made == 1
        twin = again(both)
        train(*twin, steps=(4, 5))
    assert session.optimizers_made == 2
    assert set(writer.column("tokens").values()) == {8}
    assert operands(writer, 5) == {f"Sequential1.{name}:{role}" for name in ("0", "2") for role in OPERANDS}


def test_a_model_that_takes_the_place_of_another_has_no_name_of_one_that_lives(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (_, writer):
        population = [stack(16, 16), stack(16, 16)]
        for model in population:
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=(1,))
        del model
        population[0] = copy.deepcopy(population[1])
        parameters = [p for model in population for p in model.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        train(None, optimizer, call=lambda x: population[0](x) + population[1](x), steps=(2,))
    found = rows(writer)
    assert operands(writer, 3) == {f"{name}:{role}" for name in ("0", "Sequential1.0") for role in OPERANDS}
    assert {found[3, f"{name}:input"]["numel"] for name in ("0", "Sequential1.0")} == {8 * 16}


# ------------------------------------------------------------------------------------ gradients, and what is recomputed


# --------------------------------------------------------------------------------- what the program looks at itself
