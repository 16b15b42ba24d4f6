"""A pipeline whose ranks wait for each other's host in a gather, as NCCL's do when they first send to one another."""

import pytest
from tests.session.ranks.pairs import started

from narrowgauge.observe.store import open_run

STEPS, TOO_LONG = 9, 10.0
PROGRAM = f"""
import time, torch
import torch.distributed as dist
from torch import nn
from narrowgauge.session.ranks.group import Group
dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
gather, gathers = Group.gather, [0]
def meets(self, mine):
    gathers[0] += 1
    store.add("came", 1)
    until = time.monotonic() + {TOO_LONG}
    while store.add("came", 0) < 2 * gathers[0]:
        if time.monotonic() > until:
            raise RuntimeError("the other rank did not come")
        time.sleep(0.01)
    return gather(self, mine)
Group.gather = meets
torch.manual_seed(rank)
stage = nn.Linear(8, 8)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for step in range({STEPS}):
    if rank == 0:
        y = stage(torch.full((4, 8), step + 1.0))
        dist.send(y.detach(), 1)
        dy = torch.empty(4, 8)
        dist.recv(dy, 1)
        y.backward(dy)
    else:
        x = torch.empty(4, 8)
        dist.recv(x, 0)
        stage(x.requires_grad_()).square().mean().backward()
        dist.send(x.grad, 0)
    optimizer.step()
    optimizer.zero_grad()
print("finished", flush=True)
"""


@pytest.mark.slow
def test_a_stage_waits_for_nobody_who_waits_for_what_it_sends(warm_python, tmp_path, free_port):
    ranks = started(warm_python, tmp_path, free_port, PROGRAM, "")
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert [(tmp_path / f"said{r}").read_text() for r in range(2)] == ["finished\n"] * 2
    run = open_run(tmp_path / "out")
    assert run.meta["ranks"]["merged_steps"] == STEPS
    assert not [note for note in run.meta["notes"] if "not merged" in note]
    assert run.scalars()["step"].tolist() == list(range(1, STEPS + 1))
