"""What an engine like DeepSpeed's does around its optimizer: a stand-in of the parts that it is heard by."""

import math
import sys
from types import ModuleType

import pytest
import torch
from tests.session.inline import followed
from torch import nn

import narrowgauge as ng
from narrowgauge.session.doors.deepspeed import ENGINE, _norm


class Zero:
    """Steps its optimizer group by group, or part by part (ZeRO 3), on flat float32 copies."""

    def __init__(self, model, scale=1.0, clip=0.5, parts=1):
        groups = [[p for p in model.parameters() if p.dim() == dim] for dim in (2, 1)]
        self.optimizer = torch.optim.AdamW([{"params": group, "lr": 0.1 / (1 + n)} for n, group in enumerate(groups)])
        self.model_groups, self.loss_scale, self.clip = groups, scale, clip
        self.flat = [torch.cat([p.detach().reshape(-1) for p in group]).requires_grad_() for group in groups]
        self.parts = [[x.detach().requires_grad_() for x in flat.chunk(parts)] for flat in self.flat]  # of its memory
        for group, flat in zip(self.optimizer.param_groups, self.flat, strict=True):
            group["params"] = [flat]
        self._global_grad_norm = None
        self.initialize_optimizer_states()

    def initialize_optimizer_states(self):
        for flat in self.flat:
            flat.grad = torch.zeros_like(flat)
        self.optimizer.step()

    def needs_scaler(self):
        return self.loss_scale != 1.0

    def scale_if_loss(self, value):
        return value * self.loss_scale

    def step(self):
        gradients = [torch.cat([p.grad.reshape(-1) for p in group]) / self.loss_scale for group in self.model_groups]
        self._global_grad_norm = torch.cat(gradients).norm()
        for p in (p for group in self.model_groups for p in group):
            p.grad = None
        if not self._global_grad_norm.isfinite():
            return False
        groups = self.optimizer.param_groups
        for group, parts, gradient in zip(groups, self.parts, gradients, strict=True):
            if len(parts) == 1:
                self.optimizer.param_groups = [group]
            for each in groups:
                each["params"] = []
            for part, dp in zip(parts, gradient.chunk(len(parts)), strict=True):
                part.grad = dp * min(1.0, self.clip / float(self._global_grad_norm))
                group["params"] = [part]
                self.optimizer.step()
        self.optimizer.param_groups = groups
        return True


class Engine(nn.Module):
    def __init__(self, model, **words):
        super().__init__()
        self.module = model
        self.optimizer, self.skipped_steps = Zero(model, **words), 0
        self.basic_optimizer = self.optimizer.optimizer

    def forward(self, x):
        return self.module(x)

    def backward(self, loss):
        self.optimizer.scale_if_loss(loss).backward()

    def step(self):
        self._take_model_step()

    def _take_model_step(self):
        self.skipped_steps += not self.optimizer.step()

    def get_global_grad_norm(self):
        return self.optimizer._global_grad_norm


@pytest.fixture
def loaded(monkeypatch):
    """Call it, and the program has loaded its DeepSpeed."""
    parts = {
        ENGINE: {"DeepSpeedEngine": Engine, "clip_grad_norm_": lambda parameters, max_norm: torch.tensor(3.0)},
        "deepspeed.runtime.base_optimizer": {"ZeROOptimizer": Zero},
        "deepspeed.runtime.zero.stage3": {"DeepSpeedZeroOptimizer_Stage3": Zero},
    }

    def load():
        for name, attributes in parts.items():
            module = ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)

    heard = (Engine, "_take_model_step"), (Zero, "scale_if_loss"), (Zero, "initialize_optimizer_states")
    before = [getattr(*place) for place in heard]
    yield load
    assert [getattr(*place) for place in heard] == before  # nothing of ours stays in its classes


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def train(engine, x=None, steps=2):
    losses, norms = [], []
    for _ in range(steps):
        loss = (engine(torch.ones(2, 8) if x is None else x) * 3).square().mean()
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


@pytest.mark.parametrize(
    ("early", "parts"),
    [(True, 1), (False, 1), (True, 2)],
    ids=["loaded before", "loaded with the engine", "part by part"],
)
def test_an_engine_s_step_is_one_however_many_groups_it_has_and_its_norm_is_from_before_clipping(
    tmp_path, loaded, early, parts
):
    if early:
        loaded()
    with followed(tmp_path, every=1) as (session, writer):
        if not early:
            torch.optim.SGD(model().parameters(), lr=0.5)  # whoever made it, a session is there before the engine
            loaded()
        losses, norms = train(Engine(model(), parts=parts))
    assert session.facts()["steps"] == 2  # making the states was none
    assert writer.column("loss") == pytest.approx(dict(enumerate(losses, 1)))
    assert writer.column("grad_norm") == pytest.approx(dict(enumerate(norms, 1)))
    assert min(norms) > 0.5
    assert (writer.column("lr_0"), writer.column("lr_1")) == ({1: 0.1, 2: 0.1}, {1: 0.05, 2: 0.05})
    assert not {"loss_scale", "lr_2"} & writer.scalars[1].keys()
    assert not session.hearing.notes


def test_a_loss_is_written_down_without_the_engine_s_scale(tmp_path, loaded):
    loaded()
    with followed(tmp_path) as (_, writer):
        losses, norms = train(Engine(model(), scale=1024.0))
    assert writer.column("loss") == pytest.approx(dict(enumerate(losses, 1)))
    assert writer.column("loss_scale") == {1: 1024.0, 2: 1024.0}
    assert writer.column("grad_norm") == pytest.approx(dict(enumerate(norms, 1)))


def test_a_step_that_the_engine_skips_is_a_skipped_one(tmp_path, loaded):
    loaded()
    with followed(tmp_path) as (session, writer):
        engine = Engine(model())
        train(engine, torch.full((2, 8), 1e38), steps=1)
        train(engine, steps=1)
    assert session.facts()["skipped_steps"] == 1
    assert writer.column("skipped") == {1: 1.0}
    assert (writer.column("lr_0"), writer.column("lr_1")) == ({1: 0.1, 2: 0.1}, {1: 0.05, 2: 0.05})
    assert not math.isfinite(writer.scalars[1]["grad_norm"])
    assert writer.column("microbatches") == {1: 1, 2: 1}


@pytest.mark.parametrize("parts", [1, 3])
def test_weights_that_are_stepped_piece_by_piece_are_all_measured(tmp_path, loaded, parts):
    loaded()
    with followed(tmp_path, every=1) as (_, writer):
        engine = Engine(model(), parts=parts)
        flat = engine.optimizer.flat
        before = [x.detach().double().clone() for x in flat]
        train(engine, steps=1)
    norm = torch.cat(before).norm().item()
    moved = torch.cat([x.detach() - old for x, old in zip(flat, before, strict=True)]).norm().item()
    assert writer.scalars[1]["param_norm"] == pytest.approx(norm, rel=1e-6)
    assert writer.scalars[1]["update_ratio"] == pytest.approx(moved / norm, rel=1e-5)


@pytest.mark.parametrize("which", ["engine", "model", "everything"])
def test_an_engine_that_is_older_than_the_watch_is_followed(tmp_path, loaded, which):
    loaded()
    engine = Engine(model())
    watched = {"engine": engine, "model": engine.module, "everything": None}[which]
    with ng.watch(watched, out=tmp_path / "a", every=1):
        losses, norms = train(engine)
    run = ng.open_run(tmp_path / "a")
    assert run.scalars()["loss"].tolist() == pytest.approx(losses)
    assert run.scalars()["grad_norm"].tolist() == pytest.approx(norms)
    assert {"0:input", "1:weight"} <= set(run.tensors()["site"].tolist())


def test_the_norm_of_its_own_clip_is_the_one_from_before(tmp_path, loaded):
    loaded()
    with followed(tmp_path) as (_, writer):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 8)).sum().backward()
        sys.modules[ENGINE].clip_grad_norm_(net.parameters(), max_norm=1.0)
        optimizer.step()
    assert writer.column("grad_norm") == {1: 3.0}


def test_an_engine_that_tells_nothing_trains_on(tmp_path, loaded, monkeypatch):
    monkeypatch.setattr(Zero, "needs_scaler", None)  # as if another version had neither
    monkeypatch.setattr(Engine, "get_global_grad_norm", None)
    loaded()
    with followed(tmp_path) as (session, writer):
        engine = Engine(model())
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
    assert writer.column("microbatches") == {1: 1, 2: 1}
    assert [note.partition(":")[0] for note in session.hearing.notes] == [
        "Following the program failed in loss_multiplied",
        "Following the program failed in engine_stepped",
    ]


def test_a_norm_that_it_calls_minus_one_is_none():
    assert math.isnan(_norm(-1.0))
    assert torch.isnan(_norm(torch.tensor([-1.0])))
    assert (_norm(None), _norm(2.0), float(_norm(torch.tensor(2.0)))) == (None, 2.0, 2.0)
