"""What a program may do to the process that it shares with the watch: it runs as without us, and its end is told."""

import json

import pytest
from tests.session.test_watch import run

from narrowgauge.observe.store import open_run

TRAINS = """
import ctypes, os, resource, sys, torch
from torch import nn
torch.manual_seed(3)
model = nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{loss.item():.9f}", flush=True)
train(20)
"""

NO_FILES_GROW = "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
NO_DESCRIPTORS = """
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
"""
GIVEN_BACK = "for number in taken:\n    os.close(number)\n"

FULL = "a file reached the size that this process may write"
EMPTY = "no file descriptor is left to this process"
SILENT = "its process ended (exit code 7) and could not write so"


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (NO_FILES_GROW, "sys.exit(7)", FULL),
        (NO_DESCRIPTORS, "sys.exit(7)", SILENT),  # DuckDB, without one, ends the process
        (NO_DESCRIPTORS, "import time\ntime.sleep(11)\n" + GIVEN_BACK + "sys.exit(7)", EMPTY),
        ("", "ctypes.CDLL(None)._exit(7)", SILENT),
        ("", "os.execv('/bin/sh', ['sh', '-c', 'exit 7'])", SILENT),
    ],
    ids=["no file grows", "no descriptor", "no descriptor for a while", "C's exit", "another program"],
)
def test_it_ends_as_without_us_and_its_run_says_why_it_stopped(warm_python, tmp_path, before, after, why):
    pytest.importorskip("resource")
    script = TRAINS + before + "train(5)\n" + after
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "train.py").write_text(script.replace("time.sleep(11)", ""))
    alone = warm_python.run(["python", "train.py"], cwd=tmp_path / "alone")
    done = run(tmp_path, "train.py", script=script, options=["--every", "5"], warm=warm_python)
    assert (alone.returncode, done.returncode, done.stdout) == (7, 7, alone.stdout)
    found = open_run(tmp_path / "out")
    assert (found.status, found.ends.words) == ("stopped", f"stopped: {why}")
    assert f"\nnarrowgauge: stopped: {why}; what was written is kept.\n" in f"\n{done.stderr}"
    assert json.loads((tmp_path / "out" / "run.json").read_text())["ended"]


def test_what_a_signal_ended_is_killed(warm_python, tmp_path):
    done = run(tmp_path, "train.py", script=TRAINS + "os.kill(os.getpid(), 9)", warm=warm_python)
    assert done.returncode == 128 + 9
    assert open_run(tmp_path / "out").status == "killed"
