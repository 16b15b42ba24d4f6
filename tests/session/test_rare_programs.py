"""Programs that go torch's less trodden ways: none is disturbed, and the run has them as they are."""

import copy
import io
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import narrowgauge as ng
from narrowgauge.observe.stats import host
from narrowgauge.session.models.conversions import COPIED

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


@pytest.mark.parametrize("again", [copy.deepcopy, through_a_file])
def test_so_is_a_copy_of_a_model_that_was_converted(tmp_path, again):
    with followed(tmp_path, every=1, recipe="current") as (session, writer):
        model = stack(16, 32, 16)
        both = model, torch.optim.Adam(model.parameters())
        train(*both)
        train(*again(both), steps=(4, 5))
    assert operands(writer, 5) == {f"Sequential1.{name}:{role}" for name in ("0", "2") for role in OPERANDS}
    assert session.roots.conversions.notes == [COPIED]


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


def test_a_gradient_that_a_hook_changes_is_the_one_that_is_multiplied(tmp_path):
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.many = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            y = self.one(x)
            y.register_hook(lambda dy: dy * 0.5 - 1.0)
            z = self.many(y.unflatten(0, (2, 4)))
            z.register_hook(lambda dz: -dz)
            return z

    with followed(tmp_path, every=1, judge="current") as (_, writer):
        torch.manual_seed(0)
        model = Halved()
        train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found = rows(writer)
    for name, bias in (("one", model.one.bias), ("many", model.many.bias)):  # whose gradient is the sum of all rows
        row = found[3, f"{name}:grad_output"]
        assert row["mean"] * row["numel"] == pytest.approx(bias.grad.sum().item(), rel=1e-4)


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_called_in_a_reentrant_checkpoint_of_the_program_s_is_a_training(tmp_path, whole, recipe):
    with followed(tmp_path, every=1, judge="current", recipe=recipe) as (session, writer):
        model = stack(16, 32, 32, 16)

        def call(x):
            x.requires_grad_()
            return checkpoint(model, x, use_reentrant=True) if whole else checkpoint_sequential(model, 3, x, True)

        train(model, torch.optim.SGD(model.parameters(), lr=0.1), call)
        with torch.no_grad():
            call(data(4).detach())
    assert session.facts()["steps"] == 3
    for step in (2, 3):
        assert operands(writer, step) >= {f"{name}:{role}" for name in ("0", "2", "4") for role in OPERANDS}
    assert rows(writer)[3, "0:input"]["numel"] == 8 * 16
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}


# --------------------------------------------------------------------------------- what the program looks at itself


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_mode_of_the_program_s_sees_its_own_operations(tmp_path, monkeypatch, compiled):
    if not compiled:  # then everything is counted by operations of torch's
        monkeypatch.setattr(host, "ready", lambda: False)
        monkeypatch.setattr(host, "kernel", lambda: None)

    def counts():
        model = stack(16, 32, 16)
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, steps=(1, 2))
        with Seen() as seen:
            train(model, optimizer, steps=(3,))
        return seen.counts

    alone = counts()
    with followed(tmp_path, every=1, judge="current", compiling=True) as (_, writer):
        watched = counts()
    assert watched == alone
    assert operands(writer, 3) == {f"{name}:{role}" for name in ("0", "2") for role in OPERANDS}


@pytest.mark.parametrize("recipe", [None, "current", "rowwise", "blockwise"])
def test_a_selective_checkpoint_keeps_what_the_program_computes(tmp_path, monkeypatch, recipe):
    monkeypatch.setattr(host, "ready", lambda: False)
    monkeypatch.setattr(host, "kernel", lambda: None)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            h = self.a(x)
            h = h * torch.sigmoid(h) - h.sum(-1, keepdim=True) * 0.1
            return x + self.b(h) * 0.5

    def policy(context, function, *args, **kwargs):
        kept = {torch.ops.aten.mul.Tensor, torch.ops.aten.sum.dim_IntList, torch.ops.aten.addmm.default}
        kept |= {torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default}  # what a converted layer multiplies by
        return CheckpointPolicy.MUST_SAVE if function in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def trained(**how):
        torch.manual_seed(0)
        blocks = nn.ModuleList([Block(), Block()])

        class Model(nn.Module):
            def forward(self, x):
                for block in blocks:
                    x = checkpoint(block, x, use_reentrant=False, **how)
                return x

        model = Model()
        model.blocks = blocks
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [p.detach().clone() for p in model.parameters()]

    selective = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    plan = {"recipe": recipe, "judge": "current", "compiling": True}
    if recipe is None:
        wanted = trained()
    else:
        with followed(tmp_path / "unrecorded", every=1000, **plan):
            wanted = trained()
    with followed(tmp_path / "recorded", every=1, **plan) as (_, writer):
        found = trained(**selective)
    assert all(map(torch.equal, found, wanted))
    assert operands(writer, 3) == {
        f"blocks.{n}.{name}:{role}" for n in (0, 1) for name in ("a", "b") for role in OPERANDS
    }


class SavesItsOwnWay(nn.Module):
    """A `state_dict` without torch's arguments, which tells when it is called."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.saved = 0
        self.up.register_state_dict_pre_hook(lambda *_: self.saves())

    def saves(self):
        self.saved += 1

    def state_dict(self):
        self.saves()
        return {"up": self.up.state_dict(), "down": self.down.state_dict()}

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_a_model_that_saves_its_own_way_is_followed_and_not_asked_to(tmp_path):
    model = SavesItsOwnWay()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(out=tmp_path / "run", every=1):
        for _ in range(2):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
    found = ng.open_run(tmp_path / "run")
    assert model.saved == 0
    assert {"up:input", "down:weight"} <= set(found.sites)
    assert found.meta["notes"] == []
