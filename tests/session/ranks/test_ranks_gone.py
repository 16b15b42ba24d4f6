"""Two processes, one of which is late and then gone: the other trains on, ends in time, and the run is readable."""

import time

import pytest
from tests.session.ranks.pairs import started

from narrowgauge.observe.store import open_run

PROGRAM = """
import os, signal, sys, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, gone = dist.get_rank(), int(sys.argv[1])
model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps, together=True):
    for _ in range(steps):
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        dist.barrier() if together else None
train(8)
if rank == 1 - gone:
    train(8, together=False)      # while the other sleeps
    dist.barrier()
else:
    dist.barrier()                # it has been late
    train(8, together=False)
dist.barrier()
train(8)
if rank == gone:
    os.kill(os.getpid(), signal.SIGKILL)
train(16, together=False)
print("finished", flush=True)
"""


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_late_and_then_gone(warm_python, tmp_path, gone, free_port):
    ranks = started(warm_python, tmp_path, free_port, PROGRAM, str(gone))
    assert ranks[gone].wait(120) == -9
    began = time.monotonic()
    assert ranks[1 - gone].wait(120) == 0
    assert (tmp_path / f"said{1 - gone}").read_text() == "finished\n"
    assert time.monotonic() - began < 40  # of the half minute that nobody waits for a rank
    run = open_run(tmp_path / "out", recover=gone == 0)
    table = run.tensors(["numel"], sites=["(model):input"])
    found = {}
    for step, rank, numel in zip(table["step"].tolist(), table["rank"].tolist(), table["numel"].tolist(), strict=True):
        found.setdefault(step, {})[rank] = numel
    survivor = 1 - gone
    assert survivor in found[40]
    assert len(found[40]) == 1  # on its own
    assert run.scalars("loss", rank=survivor)["step"].tolist()[-1] == 40
    if survivor == 0:
        merged = {step for step, rows in found.items() if rows == {0: 2 * 64}}
        assert {2, 3, 4, 18, 19} <= merged  # before it was late, and when it was back
        assert found[10][0] == 64  # its own; what the killed rank wrote in its last seconds may be lost
        messages = " ".join(run.events("ranks_apart")["message"].tolist())
        assert "rank 1 had not recorded it" in messages or "Ranks are not merged" in messages
