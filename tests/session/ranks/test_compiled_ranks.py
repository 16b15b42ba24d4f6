"""Compiled programs on two real ranks, recorded in graphs: the rows are those of the tensors as a whole."""

import json

import pytest
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.ranks.whole import MODEL, STEPS, by_hand, check_whole, rows
from tests.session.test_watch import PLAIN

from narrowgauge.observe.store import open_run
from narrowgauge.session.ranks.agreement import LAG

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

MODEL
if sys.argv[1] == "auto":  # one rank has not compiled for a moment, the other for ever
    import narrowgauge.session.attach as session
    session.compiling_seconds = lambda: 0.0 if rank == 1 else float("inf")

torch.manual_seed(1)
model = Model()
match sys.argv[1]:
    case "compiled in DDP" | "auto":
        model = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    case "DDP compiled":
        model = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    case "FSDP2":
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        model.compile(backend="aot_eager")

optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(STEPS):
    model(batch(step, rank)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.fixture
def trained(warm_python, tmp_path):
    """The run of a program of so many steps, all recorded."""

    def train(kind, compiled, steps):
        (tmp_path / "train.py").write_text(PROGRAM.replace("MODEL", MODEL).replace("STEPS", str(steps)))
        (tmp_path / "watch.toml").write_text(f'[watch]\nevery = 1\ncompiled = "{compiled}"\n')
        command = ["run", "--out", "out", "--config", "watch.toml", "--", "python", RANKS, "2", str(free_port())]
        environment = {**PLAIN, "OMP_NUM_THREADS": "1"}
        done = warm_python.narrowgauge([*command, "train.py", kind], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        run = open_run(tmp_path / "out")
        assert run.meta["ranks"] == {"world": 2, "merged_steps": steps, "apart_steps": 0, "backend": "gloo"}
        return run

    return train


@pytest.mark.parametrize("kind", ["compiled in DDP", "DDP compiled", "FSDP2"])
def test_what_their_graphs_show_is_merged(kind, trained):
    run = trained(kind, "graphs", STEPS)
    assert run.meta["watch"]["steps_in_graphs"] == STEPS - 1, run.meta["notes"]
    want, _, _ = by_hand(whose=2)
    check_whole(rows(run, STEPS, ""), want)


def test_ranks_make_graphs_at_one_step_though_one_of_them_finds_it_worth_it(trained, tmp_path):
    steps = LAG + 8
    run = trained("auto", "auto", steps)
    other = json.loads((tmp_path / "out" / "run.rank1.json").read_text())["meta"]
    assert run.meta["watch"]["steps_in_graphs"] == other["watch"]["steps_in_graphs"] > 0
    assert run.meta["watch"]["steps_in_graphs"] <= steps - LAG
