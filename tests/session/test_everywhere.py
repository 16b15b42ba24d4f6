"""Whether all ranks train the model that one has, and what ranks with the same part of a larger one agree on."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from narrowgauge.session.models.everywhere import ENGINES, held_by_all, part_of
from narrowgauge.session.tensors.shares import PLACE


@pytest.fixture
def four_ranks(monkeypatch):
    for library in (PLACE, *(where for where, _ in ENGINES)):  # which another test of the same process has loaded
        monkeypatch.delitem(sys.modules, library, raising=False)
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16))


def test_one_process_has_all():
    assert held_by_all(model(), model())
    assert part_of(model(), model()) == ""


@pytest.mark.usefixtures("four_ranks")
def test_a_plain_module_may_be_a_stage_that_its_weights_name():
    first, same, other = model(), model(), model(1)
    assert not held_by_all(first, first)
    assert part_of(first, first) == part_of(same, same) != part_of(other, other)


@pytest.mark.usefixtures("four_ranks")
def test_a_wrapper_over_all_ranks_has_copies_and_one_over_some_has_copies_of_a_part():
    over_all = DistributedDataParallel(model())
    assert held_by_all(over_all, over_all)
    assert part_of(over_all, over_all) == ""
    some = DistributedDataParallel(model(), process_group=dist.new_group([1, 2]))
    assert not held_by_all(some, some)
    assert part_of(some, some) == "rank 1"


@pytest.mark.usefixtures("four_ranks")
def test_so_has_a_mesh_shards():
    over_all = fully_shard(model(), mesh=init_device_mesh("cpu", (4,)))
    assert held_by_all(over_all, over_all)
    some = fully_shard(model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"])
    assert not held_by_all(some, some)
    assert part_of(some, some) == "rank 2"


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("stage", "part"), [([2], ""), ([0, 2], "stage 1")])
def test_megatron_core_knows_its_stages(monkeypatch, stage, part):
    groups = SimpleNamespace(get_pipeline_model_parallel_group=lambda: dist.new_group(stage))
    monkeypatch.setitem(sys.modules, PLACE, groups)
    assert held_by_all(model(), model()) == (not part)
    assert part_of(model(), model()) == part
