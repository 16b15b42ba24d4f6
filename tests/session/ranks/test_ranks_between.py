"""Two processes, one of which is killed, or stopped, exactly between its promise to merge a step and the gather."""

import contextlib
import os
import signal
import sys
import time

import pytest
from tests.session.test_watch import PLAIN

from narrowgauge.observe.store import open_run
from narrowgauge.session.launch import INJECTED
from narrowgauge.session.plan import Plan

PROGRAM = """
import os, signal, sys, time, torch
import torch.distributed as dist
from torch import nn
from narrowgauge.session.ranks import ranks
dist.init_process_group("gloo")
rank = dist.get_rank()
ranks.BEAT, ranks.GONE = 0.05, 0.5
launch = ranks.Ranks._launch
def leaves(self, mine, *rest):
    if mine.step == 3 and rank == 1:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    launch(self, mine, *rest)
ranks.Ranks._launch = leaves
model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 41):
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    dist.barrier() if step < 7 else time.sleep(0.05)
print("finished", flush=True)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_leaves_between_promise_and_gather(warm_python, tmp_path, how, free_port):
    (tmp_path / "train.py").write_text(PROGRAM)
    plan = Plan("asis", str(tmp_path / "out"), ("train.py",), every=1, judge="current", compiling=True).write()
    environment = {
        **PLAIN, "OMP_NUM_THREADS": "1", "NARROWGAUGE_PLAN": str(plan), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port),
        "PYTHONPATH": os.pathsep.join([str(INJECTED), PLAIN["PYTHONPATH"]]),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context((tmp_path / f"said{r}").open("wb")) for r in range(2)]
        ranks = [
            warm_python.popen(
                [sys.executable, "train.py", how], cwd=tmp_path, env={**environment, "RANK": str(r)}, stdout=outputs[r]
            )
            for r in range(2)
        ]
    began = time.monotonic()
    assert ranks[0].wait(120) == 0
    assert time.monotonic() - began < 60  # of the minutes that a collective waits
    assert (tmp_path / "said0").read_text() == "finished\n"
    if how == "SIGSTOP":
        os.kill(ranks[1].pid, signal.SIGCONT)  # it comes back to ranks that have gone on without it
    assert ranks[1].wait(120) == (0 if how == "SIGSTOP" else -9)
    run = open_run(tmp_path / "out", recover=True)
    table = run.tensors(["numel"], sites=[":input"])
    rows = zip(table["step"].tolist(), table["rank"].tolist(), table["numel"].tolist(), strict=True)
    mine = {step: numel for step, rank, numel in rows if rank == 0}
    assert mine == {step: 128.0 if step < 3 else 64.0 for step in range(1, 41)}  # merged, then its own
    messages = " ".join(run.events("ranks_apart")["message"].tolist())
    assert "Ranks are not merged, each records its own rows" in messages
    assert how == "SIGKILL" or "rank 1 gave no sign of life for 0.5 s" in messages
