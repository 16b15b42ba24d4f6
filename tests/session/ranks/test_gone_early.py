"""A rank of two is gone before ranks have met: the other comes to its end, in its own time and as it would alone."""

import subprocess
import sys

import pytest
from tests.session.test_watch import NARROWGAUGE, PLAIN

from narrowgauge.observe.store import open_run

# Both ranks are of one gloo group, and train without a single collective.
TRAIN = """
import os, signal, sys, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, gone = dist.get_rank(), int(sys.argv[1])
dist.barrier()
if sys.argv[2:] == ["early"] and rank == gone:
    os.kill(os.getpid(), signal.SIGKILL)
model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    if step == 12 and rank == gone:
        os.kill(os.getpid(), signal.SIGKILL)
"""
# A launcher that lets the others go on to their end, and is content with that.
BOTH = """
import os, subprocess, sys
command = [sys.executable, "train.py", *sys.argv[1:]]
ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank in (0, 1)]
print([each.wait() for each in ranks])
"""


@pytest.fixture
def ended(tmp_path, free_port):
    """The run of two ranks of which `gone` killed itself, and what the command said of it."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "both.py").write_text(BOTH)
    environment = {
        **PLAIN, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port),
    }  # fmt: skip

    def run(gone, *when):
        program = (sys.executable, "both.py", str(gone), *when)
        command = [*NARROWGAUGE, "run", "--every", "1", "--out", "out", "--", *program]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)

    return run


def told(done):
    return [line for line in done.stderr.splitlines() if line.startswith("narrowgauge: rank")]


def test_rank_0_which_holds_the_store_was_killed_and_rank_1_goes_on(ended, tmp_path):
    done = ended(0)
    assert (done.returncode, done.stdout) == (0, "[-9, 0]\n")
    run = open_run(tmp_path / "out")
    assert (run.status, run.ends.by_rank[1].state) == ("killed", "complete")
    assert told(done) == ["narrowgauge: rank 0 of 2 was killed; what was written is kept."]


def test_a_rank_that_was_gone_before_it_made_an_optimizer(ended, tmp_path):
    done = ended(1, "early")
    assert done.stdout == "[0, -9]\n", done.stderr
    run = open_run(tmp_path / "out")
    assert (run.status, run.ends.words) == ("complete", "rank 1 of 2 recorded nothing here")
    assert told(done) == []  # the command ended well: such a rank may have had nothing to train
