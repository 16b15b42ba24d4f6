"""Which of a tensor-parallel layer's tensors are the same on all ranks, whatever became of its group."""

import pytest
import torch.distributed as dist
from torch import nn

from narrowgauge.session.sites.megatron import Megatron
from narrowgauge.session.sites.tensor_parallel import NONE, Copies, copied
from narrowgauge.session.tensors.sharded import copied_by


def test_what_all_ranks_of_a_group_have_is_named_by_the_lowest(two_ranks):
    assert copied(two_ranks, "input") == Copies(("input",), 0)
    assert copied(two_ranks) == NONE


def test_of_a_group_of_one_or_of_none_nothing_is_known(alone):
    assert copied(alone, "input") == copied(None, "input") == NONE
    assert copied(dist.GroupMember.NON_GROUP_MEMBER, "input") == NONE


@pytest.mark.parametrize("again", [False, True])
def test_of_a_group_that_was_destroyed_nothing_is_known(two_ranks, again):
    class ColumnParallelLinear(nn.Linear):
        __module__ = "megatron.core.tensor_parallel.layers"
        gather_output, sequence_parallel, tp_group = True, False, two_ranks

    layer = ColumnParallelLinear(8, 8)
    x = layer.weight.detach()
    assert [part.copies for part in Megatron().parts(layer, (x,), {}, x)] == [Copies(("input", "grad_output"), 0)]
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(8, 8), init_sync=False)
    assert copied_by([wrapped]) == 0
    dist.destroy_process_group()
    if again:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert [part.copies for part in Megatron().parts(layer, (x,), {}, x)] == [NONE]
    assert copied_by([wrapped]) is None
    if not again:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the fixture ends
