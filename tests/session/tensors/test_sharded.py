"""What of a distributed tensor is here, and who else has it: on meshes whose collectives nobody runs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import narrowgauge as ng
from narrowgauge.compute.nn.conversion.structure import survey
from narrowgauge.compute.nn.parallel.placements import some_are_distributed
from narrowgauge.errors import ConversionError
from narrowgauge.session.tensors.fingerprint import weights_hash
from narrowgauge.session.tensors.sharded import here, is_distributed, local_of, shape_of, used_of

LOCAL = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def mesh():
    """A 2 x 2 mesh as its last rank sees it; any collective on it returns at once."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def spread(mesh, *placements):
    return DTensor.from_local(LOCAL, mesh, placements, run_check=False)


def test_a_plain_tensor_is_all_there_is_and_nobody_is_known_to_have_it():
    held = local_of(torch.nn.Parameter(LOCAL))
    assert held.tensor.data_ptr() == LOCAL.data_ptr()
    assert (type(held.tensor) is torch.Tensor, held.tensor.requires_grad, held.first) == (True, False, None)
    assert not is_distributed(LOCAL)


def test_a_copy_is_named_by_the_lowest_rank_that_has_it(mesh):
    named = {
        (Replicate(), Shard(0)): (1, 2),
        (Shard(0), Replicate()): (2, 2),
        (Replicate(), Replicate()): (0, 4),
        (Shard(0), Shard(1)): (None, 1),
    }
    for placements, expected in named.items():
        held = local_of(spread(mesh, *placements))
        assert (held.first, held.copies) == expected, placements
        assert torch.equal(held.tensor, LOCAL)


def test_a_summand_says_nothing_of_the_sum(mesh):
    assert local_of(spread(mesh, Replicate(), Partial())).tensor is None


def test_a_weight_that_was_gathered_is_a_copy_on_all_that_it_was_gathered_from(mesh):
    kept = spread(mesh, Shard(0), Shard(0))
    assert used_of(torch.nn.Parameter(LOCAL), kept)[1:] == (0, 4, 0)  # sharded over all of the mesh, and whole now
    still_cut = DTensor.from_local(LOCAL, mesh["tp"], [Shard(0)], run_check=False)
    assert used_of(still_cut, kept)[1:] == (1, 2, 0)  # gathered along dp, a part along tp
    assert used_of(kept, kept)[1:] == (None, 1, 0)  # it is not gathered for this layer


def test_what_is_here_keeps_its_gradient(mesh):
    x = spread(mesh, Replicate(), Shard(0)).requires_grad_()
    assert here(x).requires_grad
    assert here(LOCAL) is LOCAL


def test_weights_are_hashed_by_what_is_here(mesh):
    hashed = weights_hash([("w", spread(mesh, Shard(0), Shard(0)))])
    assert hashed != weights_hash([("w", DTensor.from_local(LOCAL + 1, mesh, [Shard(0), Shard(0)], run_check=False))])


@pytest.mark.parametrize(
    ("local", "placements", "why"),
    [
        ((17, 32), [Shard(0), Replicate()], "its 33 outputs cannot be divided evenly by 2 ranks"),
        ((32, 17), [Replicate(), Shard(1)], "its 33 inputs cannot be divided evenly by 2 ranks"),
        ((32, 32), [Partial(), Replicate()], "its weight is laid out as .*Partial.*; Shard and Replicate can be"),
    ],
)
def test_a_weight_that_cannot_be_multiplied_in_parts_is_not_converted(mesh, local, placements, why):
    model = nn.Sequential(nn.Linear(32, 32))
    shape = torch.Size(33 if size == 17 else size for size in local)
    part = DTensor.from_local(torch.zeros(local), mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))
    model[0].weight = nn.Parameter(part)
    with pytest.raises(ConversionError, match=why):
        ng.convert(model, "current")
    assert type(model[0]) is nn.Linear


def test_a_parameter_that_zero_3_keeps_elsewhere_has_its_whole_shape():
    p = nn.Parameter(torch.empty(0))
    assert shape_of(p) == (0,)
    p.ds_shape = torch.Size((4, 3))
    assert shape_of(p) == (4, 3)


def test_the_shape_that_counts_is_the_part_of_one_rank(mesh):
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    model[0].weight = nn.Parameter(DTensor.from_local(torch.zeros(128, 256), mesh, [Replicate(), Shard(0)]))
    assert survey(model)[0].shape == (256, 256)
    assert survey(model)[0].product == (128, 256)


def test_that_torch_knows_of_dtensors_makes_none():
    """It imports them itself, to clip gradients; only between ranks there can be one."""
    assert not some_are_distributed()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert some_are_distributed()
    finally:
        dist.destroy_process_group()
