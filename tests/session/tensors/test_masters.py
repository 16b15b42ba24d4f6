"""Models whose optimizers step copies of their weights in float32."""

import pytest
import torch
from tests.session.inline import followed
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.store import open_run
from narrowgauge.session.steps.trained import Trained
from narrowgauge.session.tensors.masters import copies_of


def model_of(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)).to(dtype)


def one_by_one(model):
    return [p.detach().float().clone().requires_grad_() for p in model.parameters()]


def flat(model):
    return [torch.cat([p.detach().float().flatten() for p in model.parameters()]).requires_grad_()]


def ids(tensors):
    return {id(p) for p in tensors}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masters", [one_by_one, flat, lambda m: one_by_one(m)[::-1]], ids=["each", "flat", "reversed"])
def test_weights_that_masters_round_to_are_found(masters, dtype):
    model = model_of(dtype)
    assert ids(copies_of(model, masters(model))) == ids(model.parameters())


def test_digits_that_only_the_masters_have_change_nothing():
    model, exact = model_of(torch.bfloat16), model_of(torch.float32)
    masters = [p.detach() for p in exact.parameters()]
    assert any(not torch.equal(m, p.float()) for m, p in zip(masters, model.parameters(), strict=True))
    assert ids(copies_of(model, masters)) == ids(model.parameters())


def frozen(model):
    return model.requires_grad_(False)


def moved(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    return model


@pytest.mark.parametrize("changed", [frozen, moved, nn.Module.float], ids=["frozen", "moved", "float32"])
@pytest.mark.parametrize("masters", [one_by_one, flat])
def test_what_is_no_copy_is_not(masters, changed):
    held = masters(model_of())
    assert copies_of(changed(model_of()), held) == []


def test_copies_of_the_same_precision_are_another_model():
    model = model_of()
    assert copies_of(model, [p.detach().clone() for p in model.parameters()]) == []


def test_zeros_and_ones_tell_nothing():
    norms = nn.Sequential(nn.LayerNorm(32), nn.LayerNorm(32)).bfloat16()
    assert copies_of(norms, one_by_one(norms)) == []
    assert copies_of(norms, flat(norms)) == []


def test_a_few_of_many_are_not_enough():
    model = model_of()
    assert copies_of(model, one_by_one(model)[-2:]) == []


def test_a_model_is_held_against_copies_once_for_each_optimizer(monkeypatch):
    asked = []
    monkeypatch.setattr("narrowgauge.session.steps.trained.copies_of", lambda *args: asked.append(1) or [])
    trained, model, other = Trained(), model_of(), model_of()
    optimizers = [torch.optim.SGD(one_by_one(other), lr=0.1) for _ in range(2)]
    for n, optimizer in enumerate(optimizers, 1):
        trained.add(optimizer)
        assert [trained.owns(model), trained.owns(model)] == [False, False]
        assert len(asked) == n


def train(model, masters, steps=4):
    """Losses of steps that end with the masters copied back."""
    optimizer, losses = torch.optim.SGD(masters, lr=0.1), []
    for step in range(steps):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad.float() for p in model.parameters()]
        values = torch.cat([g.flatten() for g in gradients])
        for at, master in enumerate(masters):
            master.grad = values if len(masters) == 1 else gradients[at]
        optimizer.step()
        with torch.no_grad():
            at = 0
            for n, p in enumerate(model.parameters()):
                p.copy_(masters[0][at : at + p.numel()].view_as(p) if len(masters) == 1 else masters[n])
                p.grad, at = None, at + p.numel()
    return losses


@pytest.mark.parametrize("masters", [one_by_one, flat])
@pytest.mark.parametrize("recipe", [None, "current"])
def test_such_a_program_is_followed(tmp_path, masters, recipe):
    alone = model_of()
    wanted = train(alone, masters(alone))
    with followed(tmp_path, every=1, judge="current", recipe=recipe) as (session, writer):
        model = model_of()
        losses = train(model, masters(model))
    assert (losses == wanted) == (recipe is None)
    assert list(writer.column("loss").values()) == pytest.approx(losses)
    assert session.facts()["not_found"] == []
    sites = {f"{layer}:{role}" for layer in "02" for role in ("input", "weight", "grad_output")}
    for step in range(1, 5):
        assert sites <= {site for at, found, _ in writer.tensors for site in found if at == step}
    assert session.facts()["parameters"] == sum(p.numel() for p in alone.parameters())
    assert all(value > 0 for value in writer.column("update_ratio").values())


def test_it_is_found_by_a_watch_of_the_model(tmp_path):
    model = model_of()
    masters = one_by_one(model)
    with ng.watch(model, out=tmp_path / "run", every=1):
        train(model, masters)
    run = open_run(tmp_path / "run")
    assert {"0:input", "2:weight"} <= set(run.sites)
    assert run.meta["not_found"] == []
