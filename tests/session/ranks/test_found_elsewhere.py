"""A pipeline's loss is its last stage's: of the others, none says that it was not found."""

import json

import pytest
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.test_watch import PLAIN

from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store import open_run

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(16, 16))
schedule = ScheduleGPipe(PipelineStage(model, rank, 2, torch.device("cpu")), 2, loss_fn=lambda y, t: y.square().mean())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    schedule.step(torch.ones(8, 16)) if rank == 0 else schedule.step(target=torch.zeros(8, 16))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("every", [1, 10])  # the loss comes with a step's tables, or with the last words
def test_a_loss_that_the_last_stage_has_was_found(warm_python, tmp_path, every):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = ["run", "--out", "out", "--every", str(every), "--", "python", RANKS, "2", str(free_port()), "train.py"]
    done = warm_python.narrowgauge(command, cwd=tmp_path, env={**PLAIN, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "No loss" not in done.stderr
    run = open_run(tmp_path / "out")
    assert len(run.scalars("loss")["loss"]) == 3
    told = [json.loads((tmp_path / "out" / name).read_text())["meta"] for name in map(manifests.name, (0, 1))]
    assert [facts["not_found"] for facts in told] == [[], []]
