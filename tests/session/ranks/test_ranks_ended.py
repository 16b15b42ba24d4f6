"""Two real processes of a program, of which one is killed: the run says so and which, whichever it was."""

import os
import re

import pytest
from tests.session.ranks.pairs import started
from tests.session.test_watch import PLAIN, run

from narrowgauge.cli.outcome import unended
from narrowgauge.observe.store import open_run

PROGRAM = """
import os, signal, sys, torch
import torch.distributed as dist
from torch import nn
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a launcher that one rank has left
dist.init_process_group("gloo")
rank, gone = dist.get_rank(), int(sys.argv[1])
model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    dist.barrier() if step < 10 else None
    if step == 10 and rank == gone:
        os.kill(os.getpid(), signal.SIGKILL)
print("finished", flush=True)
"""
NONE = 9


@pytest.mark.parametrize("gone", [0, 1, NONE])
def test_a_run_of_which_a_rank_was_killed(warm_python, tmp_path, gone, free_port):
    ranks = started(warm_python, tmp_path, free_port, PROGRAM, str(gone))
    assert [rank.wait(120) for rank in ranks] == [-9 if rank == gone else 0 for rank in range(2)]
    found = open_run(tmp_path / "out")
    if gone == NONE:
        assert (found.status, found.ends.words, unended(tmp_path / "out", 0)) == ("complete", "", [])
        return
    assert (found.status, found.ends.words) == ("killed", f"rank {gone} of 2 was killed")
    assert found.ends.by_rank[1 - gone].state == "complete"
    notes = " ".join(found.events("ranks_apart")["message"].tolist())
    assert "pair.cc" not in notes


def test_the_command_tells_which_rank_was_killed(tmp_path, free_port):
    words = ("torchrun", "--nproc-per-node", "2", "--master-port", str(free_port), "train.py", "1")
    done = run(tmp_path, *words, script=PROGRAM, env={**PLAIN, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done.stderr
    told = re.findall("narrowgauge: rank.*", done.stderr)  # a line of the launcher's may have no end before it
    assert told == ["narrowgauge: rank 1 of 2 was killed; what was written is kept."], done.stderr
    assert open_run(tmp_path / "out").status == "killed"
    assert os.path.exists(tmp_path / "out" / "run.rank1.json")
