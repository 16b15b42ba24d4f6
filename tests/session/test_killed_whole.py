"""Everything that a command started is killed at once, while ranks merge, tensors are dumped and a tracker is told."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.test_watch import NARROWGAUGE, PLAIN

from narrowgauge.cli.main import main
from narrowgauge.observe.store import open_run
from narrowgauge.observe.store.manifest import process_started

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 100_000):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open(f"step-rank{dist.get_rank()}", "a") as told:
        told.write(f"{step}\\n")
"""
SETTINGS = """
[watch]
ranks = true

[[dump]]
sites = ["0"]
steps = ["1-"]

[export]
prometheus = { file = "state.prom" }
"""

pytestmark = pytest.mark.timeout(120)


def started_by(pid):
    """A process and all that it has started, and they, and so on."""
    found = [pid]
    for number in found:
        for task in Path(f"/proc/{number}/task").glob("*/children"):
            with suppress(OSError):  # a thread may end meanwhile
                found += map(int, task.read_text().split())
    return found


WHEN = {
    "a step was made": lambda folder: (folder / "step-rank0").exists(),
    "a dump is being written": lambda folder: any((folder / "out/dumps").glob(".step*")),
    "rows were written": lambda folder: any((folder / "out").glob("*/*.parquet")),
}


def killed_when(folder, it):
    """What is left of a command that is killed, with all it started, when `it` is seen."""
    (folder / "train.py").write_text(PROGRAM)
    (folder / "ng.toml").write_text(SETTINGS)
    ours = [
        "run",
        "--config",
        "ng.toml",
        "--every",
        "1",
        "--out",
        "out",
        "--",
        "python",
        RANKS,
        "2",
        str(free_port()),
        "train.py",
    ]
    command = subprocess.Popen(
        [*NARROWGAUGE, *ours], cwd=folder, env={**PLAIN, "OMP_NUM_THREADS": "1"}, start_new_session=True
    )
    try:
        while command.poll() is None and not it(folder):
            time.sleep(0.001)
        assert command.poll() is None
    finally:
        alive = started_by(command.pid)
        for pid in alive:
            os.kill(pid, signal.SIGSTOP)  # none ends in order because another has gone
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        command.wait()
        while any(map(process_started, alive)):
            time.sleep(0.001)
    assert len(alive) >= 4  # the command, both ranks, and what exports
    return folder / "out"


@pytest.mark.parametrize("when", WHEN)
def test_what_is_left_can_be_read(tmp_path, capsys, when):
    out = killed_when(tmp_path, WHEN[when])
    run = open_run(out)
    assert run.status == "killed"
    made = run.scalars("loss")["step"].tolist()
    assert made == list(range(1, len(made) + 1))
    assert made or "rows" not in when
    roles = ("input", "weight", "grad_output")
    assert set(run.tensors()["site"].tolist()) <= {f"{layer}:{role}" for layer in "02" for role in roles}
    for dump in (out / "dumps").glob("*.safetensors"):
        assert load_file(dump)["0:weight.x"].shape == (64, 64)
    main(["report", str(out), "--text"])
    assert "Traceback" not in capsys.readouterr().err
