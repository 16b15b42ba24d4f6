"""What a converted run tells of layers of equal names on two ranks: hand-made stages, and copies."""

import pytest
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.test_watch import PLAIN

from narrowgauge.observe.store import open_run
from narrowgauge.observe.verdict.converted import converted, label

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[1]
torch.manual_seed(rank)
width = 10 if rank and kind == "narrow" else 32
model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32))
if kind == "copies":
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x = torch.randn(16, 32, requires_grad=True)
    if kind == "copies":
        model(x).square().mean().backward()
    elif rank == 0:
        y = model(x)
        dist.send(y.detach(), 1)
        dist.recv(dy := torch.empty_like(y), 1)
        y.backward(dy)
    else:
        dist.recv(x.data, 0)
        model(x).square().mean().backward()
        dist.send(x.grad, 0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
LAYERS = {  # what each is called, and whether it is in FP8
    "copies": {"0": True, "2": True},
    "stages": {"0 (rank 0)": True, "2 (rank 0)": True, "0 (rank 1)": True, "2 (rank 1)": True},
    "narrow": {"0 (rank 0)": True, "2 (rank 0)": True, "0 (rank 1)": False, "2 (rank 1)": False},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_equal_names_are_one_where_they_are_copies_and_several_where_they_are_stages(
    warm_python, tmp_path, kind
):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = ["run", "--convert", "rowwise", "--out", "out", "--", "python", RANKS, "2", str(free_port())]
    env = {**PLAIN, "OMP_NUM_THREADS": "1"}
    done = warm_python.narrowgauge([*command, "train.py", kind], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert {label(row): bool(row["recipe"]) for row in converted(open_run(tmp_path / "out").metas)} == LAYERS[kind]
    low, all_ = sum(LAYERS[kind].values()), len(LAYERS[kind])
    assert f"{low} of {all_} linear layers in FP8" in done.stderr
