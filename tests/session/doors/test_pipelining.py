"""torch's pipelines: a microbatch counts once, however many stages it goes back through."""

import pytest
import torch
import torch.distributed as dist
from tests.session.inline import followed
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B


@pytest.fixture
def alone():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_a_microbatch_that_goes_back_through_two_stages_of_a_rank_is_one(alone, tmp_path):
    wanted = []

    def loss_of(y, target):
        loss = (y - target).square().mean()
        wanted.append(loss.item())
        return loss

    with followed(tmp_path) as (session, writer):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stages = [PipelineStage(part, number, 2, torch.device("cpu")) for number, part in enumerate(model)]
        schedule = ScheduleInterleaved1F1B(stages, 3, loss_fn=loss_of)
        for step in range(2):
            schedule.step(torch.full((6, 16), 1.0 + step), target=torch.zeros(6, 16))
            optimizer.step()
            optimizer.zero_grad()
    assert writer.column("microbatches") == {1: 3, 2: 3}
    tried = len(wanted) - 6
    assert list(writer.column("loss").values()) == pytest.approx([sum(wanted[tried:-3]), sum(wanted[-3:])])
    assert not [note for note in session.facts()["notes"] if note.startswith("Backward")]
