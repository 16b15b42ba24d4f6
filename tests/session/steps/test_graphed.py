"""Modules and functions that a program has graphed: unharmed, and seen in recorded steps."""

import sys
from types import ModuleType

import pytest
import torch
from tests.session.inline import followed
from torch import nn

from narrowgauge.session.doors.cuda_graphs import TRANSFORMER_ENGINE

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ROLES = ("input", "weight", "grad_output")


class Linears(nn.Module):
    def __init__(self, kind=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = kind(32, 32), kind(32, 32)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def by_hand(module, x):
    """The same without a call of any module, as a replay is."""
    first, last = module.first, module.last
    return torch.addmm(last.bias, torch.relu(torch.addmm(first.bias, x, first.weight.t())), last.weight.t())


def make_graphed_callables(callables, sample_args, num_warmup_iters=3):
    """As torch's on a CPU: it refuses hooks, warms up, and puts replays in the place of forwards."""
    given = callables if isinstance(callables, tuple) else (callables,)
    samples = sample_args if isinstance(callables, tuple) else (sample_args,)
    made = []
    for each, args in zip(given, samples, strict=True):
        assert not getattr(each, "_forward_hooks", {}), "Modules must not have hooks"
        assert not getattr(each, "_forward_pre_hooks", {}), "Modules must not have hooks"
        for _ in range(num_warmup_iters):
            y = each(*args)
            torch.autograd.grad(y, list(REPLAYS[each].parameters()), torch.ones_like(y))
        replayed = graphed_of(REPLAYS[each])
        if isinstance(each, nn.Module):
            each.forward = replayed
            made.append(each)
        else:
            made.append(replayed)
    return tuple(made) if isinstance(callables, tuple) else made[0]


def graphed_of(module):
    def functionalized(x):
        CALLS.append("replay")
        return by_hand(module, x)

    return functionalized


CALLS, REPLAYS = [], {}  # what was replayed; the module that a callable is of


@pytest.fixture
def graphing(monkeypatch):
    CALLS.clear(), REPLAYS.clear()
    for owner in (torch.cuda, torch.cuda.graphs):
        monkeypatch.setattr(owner, "make_graphed_callables", make_graphed_callables)


def step(model, optimizer, number, device="cpu"):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(number)).to(device)
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(early, whole=True, device="cpu", steps=7):
    """Losses of a program that graphs its model, or a part of it, after so many steps."""
    inner = Linears().to(device)
    model = inner if whole else nn.Sequential(inner).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, number, device) for number in range(early)]
    REPLAYS[inner] = inner
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(99)).to(device)
    assert torch.cuda.make_graphed_callables(inner, (x,)) is inner
    return losses + [step(model, optimizer, number, device) for number in range(early, steps)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("early", [0, 3])
def test_a_graphed_module_is_unharmed_and_seen_in_recorded_steps(graphing, tmp_path, early, whole):
    wanted, replays = train(early, whole), len(CALLS)
    CALLS.clear()
    with followed(tmp_path, every=2, judge="current") as (session, writer):
        found = train(early, whole)
    assert found == pytest.approx(wanted, rel=1e-6)
    recorded = [s for s in (2, 4, 6) if s > early]
    assert len(CALLS) == replays - len(recorded)
    assert list(writer.column("loss").values()) == pytest.approx(found)
    assert session.facts()["steps"] == 7
    assert list(writer.column("tokens").values()) == [8.0] * 7  # none of them a warm-up's
    prefix = "" if whole else "0."
    sites = {f"{prefix}{layer}:{role}" for layer in ("first", "last") for role in ROLES}
    assert {s: set(rows) for s, rows, _ in writer.tensors} == dict.fromkeys((2, 4, 6), sites)
    assert session.hearing.notes == []


def test_afterwards_all_of_it_is_replayed(graphing, tmp_path):
    with followed(tmp_path, every=1, judge="current"):
        model = Linears()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        REPLAYS[model] = model
        torch.cuda.make_graphed_callables(model, (torch.ones(8, 32),))
        step(model, optimizer, 0)
        assert CALLS == []
    assert model.forward.__name__ == "functionalized"
    assert not hasattr(model.forward, "replay")
    step(model, optimizer, 1)
    assert CALLS == ["replay"]
    assert torch.cuda.make_graphed_callables is make_graphed_callables


def test_a_graphed_function_is_called_as_it_was_in_recorded_steps(graphing, tmp_path):
    with followed(tmp_path, every=2, judge="current") as (session, writer):
        model, head = nn.Linear(32, 32), Linears()

        def tail(x):
            return head(x)

        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        REPLAYS[tail] = REPLAYS[model] = head
        (graphed,) = torch.cuda.make_graphed_callables((tail,), ((torch.ones(8, 32),),))
        for _ in range(4):
            graphed(model(torch.ones(8, 32))).square().mean().backward()
            optimizer.step()
    assert session.hearing.notes == []
    assert session.facts()["steps"] == 4
    assert CALLS == ["replay"] * 2
    assert {s for s, _, _ in writer.tensors} == {2, 4}
    assert any(":grad_output" in site and "first" in site for _, sites, _ in writer.tensors for site in sites)


def test_an_error_while_graphing_is_the_program_s_and_hooks_come_back(graphing, tmp_path):
    with followed(tmp_path) as (session, writer):
        model = Linears()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, 0)
        with pytest.raises(KeyError):
            torch.cuda.make_graphed_callables(model, (torch.ones(8, 32),))
        step(model, optimizer, 1)
    assert session.facts()["steps"] == 2
    assert list(writer.column("loss")) == [1, 2]


def test_transformer_engine_s_own_is_heard_once_it_is_loaded(graphing, tmp_path, monkeypatch):
    with followed(tmp_path, every=1, judge="current") as (_, writer):
        for name in TRANSFORMER_ENGINE:
            module = ModuleType(name)
            module.make_graphed_callables = make_graphed_callables
            monkeypatch.setitem(sys.modules, name, module)
        model = Linears()
        REPLAYS[model] = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, 0)
        sys.modules[TRANSFORMER_ENGINE[1]].make_graphed_callables(model, (torch.ones(8, 32),))
        step(model, optimizer, 1)
    assert CALLS == []
    assert {s for s, _, _ in writer.tensors} == {1, 2}


@cuda
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS", "ignore:The AccumulateGrad node's stream")  # torch's own
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("early", [0, 3])
def test_on_a_gpu(tmp_path, early, whole):
    wanted = train(early, whole, "cuda")
    with followed(tmp_path, every=2, judge="current") as (session, writer):
        found = train(early, whole, "cuda")
    assert found == pytest.approx(wanted, rel=1e-5)
    assert list(writer.column("loss").values()) == pytest.approx(found)
    prefix = "" if whole else "0."
    sites = {f"{prefix}{layer}:{role}" for layer in ("first", "last") for role in ROLES}
    assert {s: set(rows) for s, rows, _ in writer.tensors} == dict.fromkeys((2, 4, 6), sites)
    assert session.hearing.notes == []
