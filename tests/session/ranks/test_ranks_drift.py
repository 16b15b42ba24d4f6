"""Two processes under DDP, one of whose weights moves away from the other's in the middle of training."""

import pytest
from tests.session.ranks.pairs import started

from narrowgauge.observe.store import open_run

PROGRAM = """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 9):
    if sys.argv[1] == "drift" and rank == 1 and step == 4:  # as a bit that flips in one rank's memory, or a stray copy
        with torch.no_grad():
            model.module[2].weight[1, 3] *= 1.5
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + rank))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(step, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("word", ["drift", "none"])
def test_weights_that_drift_apart_are_one_event(warm_python, tmp_path, word, free_port):
    ranks = started(warm_python, tmp_path, free_port, PROGRAM, word)
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert [(tmp_path / f"said{rank}").read_text() for rank in (0, 1)] == ["8\n"] * 2  # training went on
    run = open_run(tmp_path / "out")
    found = run.events("replicas_disagree")
    if word == "none":
        assert found.rows == 0
        return
    assert found["step"].tolist() == [4]  # the first step that shows it, and not each of the rest
    assert found["site"].tolist() == ["2:weight"]
    assert "rank" in found["message"][0]
    assert run.meta["ranks"]["merged_steps"] == 8
