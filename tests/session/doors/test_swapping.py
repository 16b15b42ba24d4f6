"""A watched program may have torch swap its parameters: nothing of ours holds them meanwhile, or it would refuse."""

import sys
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.session.inline import followed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import narrowgauge as ng
from narrowgauge.compute.nn import Fp8Linear
from narrowgauge.session.tensors.weakly import let_go, weakly

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.fixture
def one_rank():
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, steps=2, x=X):
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def loaded_on_the_way(model):
    """Train, load the weights of the beginning, train on; the losses are as if there had been two trainings."""
    state = {name: p.detach().clone() for name, p in model.state_dict().items()}
    optimizer = optimizer_of(model)
    train(model, optimizer)
    model.load_state_dict(state)
    train(model, optimizer)


@pytest.mark.parametrize("recipe", [None, "current"])
def test_weights_are_loaded_by_swapping(tmp_path, swapping, recipe):
    with followed(tmp_path, judge="current", every=1, recipe=recipe) as (session, writer):
        model = net()
        loaded_on_the_way(model)
    assert any(isinstance(layer, Fp8Linear) for layer in model.modules()) == (recipe is not None)
    losses = list(writer.column("loss").values())
    assert len(losses) == 4
    assert losses[:2] == losses[2:]  # the model is still known as the one that trains
    assert session.facts()["models"] == 1
    assert [step for step, sites, _ in writer.tensors for site in sites if site == "0:grad_output"] == [1, 2, 3, 4]
    assert not writer.events
    assert not session.facts()["notes"]


def test_a_sharded_model_is_converted(tmp_path, one_rank):
    with followed(tmp_path, judge="current", every=1) as (session, writer):
        model = net()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = optimizer_of(model)
        model.double()
        train(model, optimizer, x=X.double())
        model.float()  # and after it was called, after which FSDP2 itself cannot train it any more
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(writer.column("loss")) == 2
    assert session.facts()["models"] == 1


def test_where_the_program_took_the_function_by_name(tmp_path, monkeypatch):
    program = types.ModuleType("program")
    program.swap = original = torch.utils.swap_tensors
    monkeypatch.setitem(sys.modules, "program", program)
    with followed(tmp_path, judge="current", every=1):
        model = net()
        train(model, optimizer_of(model))
        program.swap(model[0].weight, nn.Parameter(torch.zeros(32, 16)))
    assert not model[0].weight.any()
    assert program.swap is torch.utils.swap_tensors is original


def test_what_the_program_holds_weakly_is_refused_as_ever(tmp_path, swapping):
    with followed(tmp_path, judge="current", every=1) as (session, _):
        model = net()
        train(model, optimizer := optimizer_of(model))
        its_own = weakref.ref(model[0].weight, lambda _: None)
        with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref"):
            torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(32, 16)))
        del its_own
        assert optimizer in session.optimizers
        assert weakref.getweakrefs(model[0].weight)  # ours is taken again


def test_nothing_is_held_by_a_session_that_ended(tmp_path, swapping):
    with ng.watch(model := net(), out=tmp_path / "run", every=1) as run:
        train(model, optimizer_of(model))
    original = torch.utils.swap_tensors
    assert run is not None
    assert not weakref.getweakrefs(model[0].weight)
    original(model[0].weight, nn.Parameter(torch.zeros(32, 16)))
    assert not model[0].weight.any()


def test_one_session_that_ends_leaves_another_what_it_holds(tmp_path):
    with followed(tmp_path, judge="current", every=1) as (outer, _):
        model = net()
        train(model, optimizer := optimizer_of(model))
        with followed(tmp_path, judge="current", every=1):
            pass
        assert optimizer in outer.optimizers
        assert all(weakref.getweakrefs(p) for p in model.parameters())
    assert not any(weakref.getweakrefs(p) for p in model.parameters())


def test_what_a_session_counts_is_counted_before_it_lets_go(tmp_path):
    with ng.watch(model := nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(4)), out=tmp_path / "run", every=1):
        train(model, optimizer_of(model))
    assert ng.open_run(tmp_path / "run").meta["parameters"] == sum(p.numel() for p in model.parameters())


def test_who_asks_for_a_tensor_while_it_is_swapped_gets_what_all_have():
    x, y = torch.zeros(2), torch.ones(2)
    held = weakly(x)
    with let_go(x, y):
        assert held() is None
        assert weakly(x) is held
        new = weakly(y)  # another thread makes an optimizer
        with let_go(y):  # of another session's
            assert not weakref.getweakrefs(x)
            assert not weakref.getweakrefs(y)
        assert not weakref.getweakrefs(y)
    assert held() is x
    assert new() is y
    with let_go(x, y):
        torch.utils.swap_tensors(x, y)
    assert (x.tolist(), y.tolist()) == ([1, 1], [0, 0])


def test_a_watch_that_ends_while_tensors_are_swapped_holds_none(tmp_path):
    x = torch.zeros(2)
    held = weakly(x)
    with let_go(x), followed(tmp_path, judge="current", every=1):
        pass
    assert held() is None
    assert not weakref.getweakrefs(x)


def test_a_tensor_is_held_by_one_for_all_and_no_other_that_gets_its_id():
    x = torch.zeros(2)
    held = weakly(x)
    assert held is weakly(x)
    assert held() is x
    y = torch.zeros(2)
    held.take(y)  # as if x had been freed before, and y had its id
    assert weakly(x) is not held
    assert weakly(x)() is x
    del y
    assert held() is None
