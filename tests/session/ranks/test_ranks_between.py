"""Two processes, one of which is killed, or stopped, exactly between its promise to merge a step and the gather."""

import os
import signal
import time

import pytest
from tests.session.ranks.pairs import started

from narrowgauge.observe.store import open_run

PROGRAM = """
import os, signal, sys, time, torch
import torch.distributed as dist
from torch import nn
from narrowgauge.session.ranks import together
dist.init_process_group("gloo")
rank = dist.get_rank()
together.BEAT, together.GONE = 0.05, 0.5
gather = together.Together.gather
def leaves(self, mine, *rest):
    if mine.step == 3 and rank == 1:
        for flight in self._flights._flying:
            flight.gather.check()  # the second step's has ended: nothing of it depends on this process any more
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    gather(self, mine, *rest)
together.Together.gather = leaves
model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 41):
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    dist.barrier() if step < 6 else time.sleep(0.05)
print("finished", flush=True)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_leaves_between_promise_and_gather(warm_python, tmp_path, how, free_port):
    ranks = started(warm_python, tmp_path, free_port, PROGRAM, how)
    began = time.monotonic()
    assert ranks[0].wait(120) == 0
    assert time.monotonic() - began < 60  # of the minutes that a collective waits
    assert (tmp_path / "said0").read_text() == "finished\n"
    if how == "SIGSTOP":
        os.kill(ranks[1].pid, signal.SIGCONT)  # it comes back to ranks that have gone on without it
    assert ranks[1].wait(120) == (0 if how == "SIGSTOP" else -9)
    run = open_run(tmp_path / "out", recover=True)
    table = run.tensors(["numel"], sites=["(model):input"])
    rows = zip(table["step"].tolist(), table["rank"].tolist(), table["numel"].tolist(), strict=True)
    mine = {step: numel for step, rank, numel in rows if rank == 0}
    assert mine == {step: 128.0 if step < 3 else 64.0 for step in range(1, 41)}  # merged, then its own
    messages = " ".join(run.events("ranks_apart")["message"].tolist())
    assert "Ranks are not merged, each records its own rows" in messages
    assert how == "SIGKILL" or "rank 1 gave no sign of life for 0.5 s" in messages
