import pytest
import torch.distributed as dist


def group_of(ranks):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def alone():
    """A process group of one."""
    yield from group_of(1)


@pytest.fixture
def two_ranks():
    """The first rank of two, of which the other is only thought."""
    yield from group_of(2)
