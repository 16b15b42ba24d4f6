"""Of all collectives that two ranks begin, as torch's profiler has them, one is ours for each recorded step."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.test_watch import NARROWGAUGE, PLAIN

from narrowgauge.observe.store import open_run

STEPS, EVERY, LAYERS = 16, 2, 40
LAG = 4  # steps until a recorded one is gathered: those of the last begin behind the profile
PROGRAM = f"""
import collections, json
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range({LAYERS}))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with profile(activities=[ProfilerActivity.CPU]) as profiled:
    for _ in range({STEPS}):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
begun = collections.Counter(event.name for event in profiled.events() if event.name.startswith("gloo:"))
with open(f"begun{{dist.get_rank()}}.json", "w") as file:
    json.dump(begun, file)
"""


def begun(folder, *ours):
    """What each rank begins, by its name."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    words = [sys.executable, RANKS, "2", str(free_port()), "train.py"]
    done = subprocess.run([*ours, *words], cwd=folder, env={**PLAIN, "OMP_NUM_THREADS": "1"}, timeout=200)
    assert done.returncode == 0
    return [Counter(json.loads((folder / f"begun{rank}.json").read_text())) for rank in range(2)]


@pytest.mark.timeout(300)
def test_one_is_ours_for_each_recorded_step_and_all_others_are_the_programs(tmp_path):
    alone = begun(tmp_path / "alone")
    watched = begun(tmp_path / "watched", *NARROWGAUGE, "run", "--every", str(EVERY), "--out", "out", "--")
    run = open_run(tmp_path / "watched" / "out")
    assert len(run.sites) == 3 * LAYERS
    recorded = sorted(set(run.tensors()["step"].tolist()))
    assert recorded == list(range(EVERY, STEPS + 1, EVERY))
    assert alone[0]["gloo:all_reduce"] >= STEPS
    for here, without in zip(watched, alone, strict=True):
        more = here - without
        assert not without - here
        assert more.keys() == {"gloo:gather"}
        assert len(recorded) - LAG / EVERY <= more["gloo:gather"] <= len(recorded)
