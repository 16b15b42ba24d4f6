"""Delayed scales under DDP are, bit by bit, those of the model in one piece that sees every rank's batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from tests.compute.nn.parallel.model import RECIPES, STEPS, Model, batch, in_one_piece
from tests.compute.nn.parallel.ranks import play
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import narrowgauge as ng
from narrowgauge.errors import ConversionError

SITES = 3 * 5  # of five layers


@pytest.fixture(scope="module")
def ranks(warm_python, tmp_path_factory):
    return play(warm_python, tmp_path_factory.mktemp("ddp"), "ddp.py")


def equal(found, want):
    assert found.keys() == want.keys()
    return all(torch.equal(found[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("which", ["before", "after", "compiled", "given", "micro"])
def test_scales_are_those_of_the_model_in_one_piece(ranks, which):
    model, _ = ng.convert(Model(), RECIPES["delayed"])
    losses, _, weights, state = in_one_piece(model, range(STEPS), micro=2 if which == "micro" else 1)
    for rank, found in enumerate(ranks):
        assert found[which]["losses"] == losses[rank]
        assert equal(found[which]["weights"], weights)
        assert equal(found[which]["state"], state)


def test_one_collective_a_step_for_the_whole_model(ranks):
    for found in ranks:
        for which in ("before", "after", "compiled", "given", "micro"):
            assert found[which]["asked"] == [(SITES,)] * STEPS


def test_on_request_each_rank_has_its_own(ranks):
    first, second = [found["own"]["state"] for found in ranks]
    differ = {name.split(".")[-2] for name in first if name.endswith(".scale") and not equal_at(first, second, name)}
    assert differ == {"up", "down", "last"}
    weights = [name for name in first if name.endswith(".history")]
    assert all(torch.equal(first[name][1], second[name][1]) for name in weights)  # but of weights, which are copies
    assert [found["own"]["asked"] for found in ranks] == [[], []]


def equal_at(first, second, name):
    return torch.equal(first[name], second[name])


def test_nobody_is_asked_who_need_not_step_as_well(ranks):
    for found in ranks:
        assert (SITES,) not in found["joined"]["asked"]  # join itself counts who is there
        assert [text for text in found["said"] if "join()" in text] != []
    assert ranks[0]["alone"]["asked"] == []
    assert len(ranks[0]["alone"]["losses"]) == 2


@pytest.fixture
def fake():
    """The first of two ranks, whose collectives nobody runs."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_rank_that_saves_alone_asks_nobody(fake, monkeypatch):
    """An optimizer that stepped inside of a backward leaves the end of its step to whoever comes first."""
    asked = []
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: asked.append(args))
    model = ng.convert(nn.Sequential(nn.Linear(32, 32)), RECIPES["delayed"])[0]
    ddp = DistributedDataParallel(model)
    ddp(batch(0, 0))  # nobody runs DDP's own collectives, either
    clock = model[0]._fp8.clock
    clock._ended_inside_backward = True
    saved = ng.scaling_state(model)
    assert asked == []
    assert (saved["narrowgauge.0.amax_now"][:2] > 0).all()  # as a step that still runs
    clock.catch_up()
    assert len(asked) == 1


def test_a_table_that_is_copied_asks_those_of_the_copy(fake):
    model = ng.convert(nn.Sequential(nn.Linear(32, 32)), RECIPES["delayed"], reduce_amax=False)[0]
    assert copy.deepcopy(model)[0]._fp8.table._over_ranks.wanted is False


def test_what_is_no_group_is_refused():
    with pytest.raises(ConversionError, match="reduce_amax is a str; expected True, False, or a"):
        ng.convert(nn.Sequential(nn.Linear(32, 32)), "delayed", reduce_amax="world")
