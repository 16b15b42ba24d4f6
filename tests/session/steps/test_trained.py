"""Optimizers whose parameters are exchanged after they were made: the model is still theirs, and norms are parts."""

import pytest
import torch
import torch.distributed as dist
from tests.session.inline import followed
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from narrowgauge.session.steps.trained import Trained


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def exchanged():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = Trained()
    trained.add(optimizer)
    return model, optimizer, trained


def test_a_model_is_found_by_what_its_optimizer_was_made_with(tmp_path):
    with followed(tmp_path, judge="current", every=1) as (session, writer):
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), requires_grad=True)
        optimizer.param_groups[0]["params"] = [flat]
        for _ in range(2):
            model(torch.ones(4, 16)).square().mean().backward()
            flat.grad = torch.ones_like(flat)
            optimizer.step()
    assert session.facts()["models"] == 1
    assert {site for _, sites, _ in writer.tensors for site in sites} >= {"0:input", "1:grad_output"}


def test_what_is_laid_flat_on_several_ranks_is_a_part(two_ranks):
    model, optimizer, trained = exchanged()
    assert not trained.in_parts(optimizer)
    optimizer.param_groups[0]["params"] = [torch.zeros(10, requires_grad=True)]
    assert trained.in_parts(optimizer)
    optimizer.param_groups[0]["params"] = [torch.zeros(20, requires_grad=True)]
    assert not trained.in_parts(optimizer)  # flat, and all of it
    assert trained.ids() > {id(p) for p in model.parameters()}


def test_a_master_of_the_same_shape_is_whole_and_so_is_what_one_rank_has(two_ranks):
    model, optimizer, trained = exchanged()
    optimizer.param_groups[0]["params"] = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert not trained.in_parts(optimizer)


def test_one_process_has_everything():
    _, optimizer, trained = exchanged()
    optimizer.param_groups[0]["params"] = [torch.zeros(10, requires_grad=True)]
    assert not trained.in_parts(optimizer)


def test_nothing_is_kept_alive():
    model, optimizer, trained = exchanged()
    assert (len(trained), optimizer in trained) == (1, True)
    del model
    optimizer.param_groups[0]["params"] = []
    assert trained.ids() == set()
    del optimizer
    assert len(trained) == 0


def test_optimizers_are_told_apart_as_objects_and_held_weakly():
    class Alike(torch.optim.SGD):
        __hash__ = None

        def __eq__(self, other):
            return isinstance(other, Alike)

    models = [nn.Linear(4, 4) for _ in range(2)]
    first, second = (Alike(model.parameters(), lr=0.1) for model in models)
    trained = Trained()
    trained.add(first)
    assert first in trained
    assert second not in trained
    trained.add(second)
    assert [id(optimizer) for optimizer in trained] == [id(first), id(second)]
    assert trained.ids() == {id(p) for model in models for p in model.parameters()}
    del first
    assert len(trained) == 1
    assert trained.ids() == {id(p) for p in models[1].parameters()}


def test_a_model_whose_copies_come_in_a_later_group_is_trained_from_then_on(tmp_path):
    with followed(tmp_path) as (session, _):
        model, late = nn.Linear(4, 4), nn.Linear(8, 8).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert not session.optimizers.owns(late)
        optimizer.add_param_group({"params": [p.detach().float().requires_grad_() for p in late.parameters()]})
        assert session.optimizers.owns(late)
