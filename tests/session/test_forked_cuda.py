"""A program that forks after it has woken its GPU: the parent is watched as ever, and children are no worse off."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tests.session.test_watch import NARROWGAUGE, PLAIN

import narrowgauge as ng
from narrowgauge.observe.store import open_run

PROGRAM = """
import json, os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device(sys.argv[1])
torch.manual_seed(0)
model = nn.Linear(64, 32, bias=False).to(device)      # the GPU is awake
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(4 * 16, 64))
losses, children = [], []

def child():
    # As much as a forked child can do: train on the CPU. With a GPU it could do nothing.
    try:
        small = nn.Linear(4, 4)
        stepper = torch.optim.SGD(small.parameters(), lr=0.1)
        for _ in range(3):
            small(torch.ones(2, 4)).sum().backward()
            stepper.step()
        code = 0
    except BaseException as error:
        print("child:", repr(error), flush=True)
        code = 2
    sys.exit(code)

def step(x, forks):
    x = x.to(device)
    loss = model(x).square().mean()
    loss.backward()
    if forks:                                          # amid a step
        pid = os.fork()
        if not pid:
            child()
        children.append(os.waitpid(pid, 0)[1])
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    torch.save(x.cpu(), "last.pt")

for (x,) in DataLoader(data, batch_size=16, num_workers=2, multiprocessing_context="fork"):
    step(x, forks=False)
for (x,) in DataLoader(data, batch_size=16):
    step(x, forks=True)
with open("told.json", "w") as f:
    json.dump({"losses": losses, "children": children}, f)
"""


def watched(folder, device, recorded=True):
    """The program's own words, alone or under the watch."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    watch = [*NARROWGAUGE, "run", "--out", "out", "--every", "1", "--"] if recorded else []
    paths = os.pathsep.join([PLAIN["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])  # where else packages may lie
    done = subprocess.run(
        [*watch, sys.executable, "train.py", device],
        cwd=folder, env={**PLAIN, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "told.json").read_text()), done


def check(tmp_path, device):
    alone, alone_done = watched(tmp_path / "alone", device, recorded=False)
    told, done = watched(tmp_path / "watched", device)
    assert told == alone
    words, alone_words = ([line for line in d.stdout.splitlines() if "child:" in line] for d in (done, alone_done))
    assert words == alone_words  # a child of a process that woke its GPU cannot train, watched or not
    if device == "cpu":
        assert told["children"] == [0] * 4
        assert not words
    run = open_run(tmp_path / "watched" / "out")
    assert run.scalars("loss")["loss"].tolist() == pytest.approx(told["losses"], rel=1e-6)
    table = run.tensors(["amax", "numel", "sqnr_db"], sites=["(model):input"], steps=[8])
    x = torch.load(tmp_path / "watched" / "last.pt")
    want = ng.measure(x, ng.quantize(x, ng.formats.E4M3FN))
    assert (table.rows, table["numel"][0], table["amax"][0]) == (1, x.numel(), want["amax"])
    assert table["sqnr_db"][0] == pytest.approx(want["sqnr_db"], rel=1e-4)
    assert not run.events("watch_failed").rows
    assert not list((tmp_path / "watched" / "out").glob("process-*"))  # children are not watched


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_program_that_forks_after_it_woke_its_gpu(tmp_path):
    check(tmp_path, "cuda")
