"""What Megatron-Core's schedules and optimizers do by themselves: a stand-in of the parts that they are heard by."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.autograd import Variable

from narrowgauge.session.doors.megatron import SCALES, SCHEDULES, _told


def custom_backward(output, grad_output):
    assert output.numel() == 1
    if grad_output is None:
        grad_output = torch.ones_like(output)
    Variable._execution_engine.run_backward((output,), (grad_output,), False, False, (), True, True)


def deallocate_output_tensor(out, deallocate_pipeline_outputs=False):
    if deallocate_pipeline_outputs:
        out.data = torch.full((1,), torch.nan)


class Optimizer:
    """Steps float32 copies of the weights, which it has put in their place."""

    def __init__(self, model, scale=None, clip=0.5):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.own = list(model.parameters())
        self.main = [p.detach().float().clone().requires_grad_() for p in self.own]
        self.optimizer.param_groups[0]["params"] = self.main
        self.clip, self.grad_scaler = clip, scale

    def scale_loss(self, loss):
        return loss if self.grad_scaler is None else self.grad_scaler.scale * loss

    def step(self):
        scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.scale)
        for main, p in zip(self.main, self.own, strict=True):
            main.grad, p.grad = p.grad.float() / scale, None
        self.norm = torch.cat([main.grad.flatten() for main in self.main]).norm().item()
        if not self.norm < float("inf"):
            return False, None, None
        for main in self.main:
            main.grad *= min(1.0, self.clip / self.norm) if self.clip else 1.0
        self.optimizer.step()
        with torch.no_grad():
            for main, p in zip(self.main, self.own, strict=True):
                p.copy_(main)
        return True, self.norm if self.clip else 0.0, None


@pytest.fixture
def megatron(monkeypatch):
    """The two modules, as a program would have loaded them."""
    schedules, optimizers = ModuleType(SCHEDULES), ModuleType(SCALES[0])
    schedules.custom_backward, schedules.deallocate_output_tensor = custom_backward, deallocate_output_tensor
    schedules.get_forward_backward_func = None
    base = type("MegatronOptimizer", (), {"scale_loss": Optimizer.scale_loss})
    own = {"__init__": Optimizer.__init__, "step": Optimizer.step}
    optimizers.MegatronOptimizer, optimizers.MixedPrecisionOptimizer = base, type("Mixed", (base,), own)
    monkeypatch.setitem(sys.modules, SCHEDULES, schedules)
    monkeypatch.setitem(sys.modules, SCALES[0], optimizers)
    return SimpleNamespace(schedules=schedules, make=optimizers.MixedPrecisionOptimizer)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()


def train(megatron, model, optimizer, steps=3, free=True, spoilt=()):
    """Losses and norms of a schedule's own loop with two microbatches a step."""
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for micro in range(2):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * step + micro)).bfloat16()
            loss = (model(x) - x).float().square().mean() / 2
            if step in spoilt:
                loss = loss * float("inf")
            total += loss.item()
            megatron.schedules.deallocate_output_tensor(loss, free)
            megatron.schedules.custom_backward(optimizer.scale_loss(loss), None)
        losses.append(total)
        optimizer.step()
        norms.append(optimizer.norm)
    return losses, norms


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("scale", [None, SimpleNamespace(scale=torch.tensor([1024.0]))], ids=["alone", "scaled"])
def test_losses_norms_and_scales_are_the_program_s_own(megatron, tmp_path, free, scale):
    alone = model_of()
    wanted = train(megatron, alone, megatron.make(alone, scale), free=free)
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = model_of()
        assert train(megatron, model, megatron.make(model, scale), free=free) == wanted
    losses, norms = wanted
    assert list(writer.column("loss").values()) == pytest.approx(losses)
    assert list(writer.column("grad_norm").values()) == pytest.approx(norms)
    assert max(norms) > 0.5
    assert list(writer.column("microbatches").values()) == [2, 2, 2]
    assert list(writer.column("loss_scale").values()) == ([] if scale is None else [1024.0] * 3)
    assert session.facts()["not_found"] == []
    assert session.hearing.notes == []
    sites = {f"{layer}:{role}" for layer in "01" for role in ("input", "weight", "grad_output")}
    assert {step: set(found) for step, found, _ in writer.tensors} == dict.fromkeys((1, 2, 3), sites)


def test_without_a_limit_the_norm_is_measured(megatron, tmp_path):
    with followed(tmp_path) as (_, writer):
        model = model_of()
        _, norms = train(megatron, model, megatron.make(model, clip=0.0))
    assert list(writer.column("grad_norm").values()) == pytest.approx(norms)


def test_a_skipped_step_is_one(megatron, tmp_path):
    with followed(tmp_path) as (session, writer):
        model = model_of()
        train(megatron, model, megatron.make(model, SimpleNamespace(scale=torch.tensor([2.0]))), spoilt=[1])
    assert session.facts()["steps"] == 3
    assert session.facts()["skipped_steps"] == 1
    assert writer.column("skipped") == {2: 1.0}
    assert writer.column("lr") == {1: 0.1, 2: 0.1, 3: 0.1}


def test_what_a_chain_skipped_are_all_that_are_chained_in_it():
    held = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(3)]
    first, *others = (SimpleNamespace(optimizer=optimizer) for optimizer in held)
    chain = SimpleNamespace(chained_optimizers=[first, SimpleNamespace(chained_optimizers=others)])
    assert _told(chain, (False, None, None)) == (None, True, held)
    assert _told(chain, (True, 3.0, None)) == (3.0, False, held)
    assert _told(first, None) == (None, False, held[:1])


def test_a_gradient_from_a_later_stage_is_no_loss(megatron, tmp_path):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = model_of()
        optimizer = megatron.make(model)
        for _ in range(2):
            y = model(torch.ones(8, 32, dtype=torch.bfloat16))
            dy = torch.ones_like(y)
            megatron.schedules.deallocate_output_tensor(y, True)
            megatron.schedules.custom_backward(y, dy)
            optimizer.step()
    assert writer.column("loss") == {}
    assert writer.column("microbatches") == {1: 0, 2: 0}  # they are the last stage's
    assert session.facts()["not_found"] == ["No loss was found: backward was called on no scalar."]
    assert session.facts()["steps"] == 2
    assert {"0:grad_output", "1:grad_output"} <= {site for _, sites, _ in writer.tensors for site in sites}


def test_an_error_of_a_backward_pass_is_the_program_s(megatron, tmp_path):
    with followed(tmp_path) as (session, _):
        model = model_of()
        optimizer = megatron.make(model)
        with pytest.raises(AssertionError):
            megatron.schedules.custom_backward(model(torch.ones(8, 32, dtype=torch.bfloat16)), None)
        train(megatron, model, optimizer, steps=1)
    assert session.facts()["steps"] == 1
    assert session.hearing.notes == []


def test_all_is_as_before_afterwards(megatron, tmp_path):
    before = dict(vars(megatron.schedules)), dict(vars(megatron.make))
    with followed(tmp_path):
        assert megatron.schedules.custom_backward is not custom_backward
    assert (dict(vars(megatron.schedules)), dict(vars(megatron.make))) == before
