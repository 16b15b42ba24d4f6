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


class Numbered(nn.Module):
    """A stage that calls its layer `0`, whichever it is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x):
        return self.layers[0](x)


def test_stages_of_a_rank_that_number_their_own_layers_are_told_apart(alone, tmp_path):
    with followed(tmp_path) as (session, _):
        stages = [PipelineStage(Numbered(), number, 2, torch.device("cpu")) for number in range(2)]
        optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.1)
        schedule = ScheduleInterleaved1F1B(stages, 3, loss_fn=nn.functional.mse_loss)
        schedule.step(torch.ones(6, 16), target=torch.zeros(6, 16))
        optimizer.step()
        sites = [f"{layer}:input" for layer in ("layers.0", "stage1.layers.0", "layers.7")]
        assert [session.roots.stage(site) for site in sites] == [0, 1, None]


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
    assert writer.column("tokens") == {1: 6, 2: 6}  # of the first stage: what the second is given is no data
    # Gradients are divided by the microbatches in the end, so the step's loss is their mean.
    assert list(writer.column("loss").values()) == pytest.approx([sum(wanted[tried:-3]) / 3, sum(wanted[-3:]) / 3])
    assert not [note for note in session.facts()["notes"] if note.startswith("Backward")]
