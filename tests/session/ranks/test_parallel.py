"""Each kind of parallel training on two real ranks, unedited: the rows of the run are those of the tensors as a whole.

One program trains the same small model four ways, one after the other; the same is trained here by hand, in one piece.
"""

import pytest
import torch
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.ranks.whole import MODEL, STEPS, by_hand, check_whole, rows
from tests.session.test_watch import PLAIN
from torch import nn

from narrowgauge.observe.store import open_run

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

MODEL

class Copied(Model): pass
class Sharded(Model): pass
class Parallel(Model): pass
class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.up = model.up
    def forward(self, x):
        return torch.relu(self.up(x))
class Second(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.down = model.down
    def forward(self, x):
        return self.down(x)

def made(kind):
    torch.manual_seed(1)
    return kind()

kept = []
def train(model, parameters, who):
    kept.append(model)  # or the next would be taken for it, under the same names
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for step in range(STEPS):
        model(batch(step, who)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()

model = parallelize_module(made(Parallel), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
train(model, model.parameters(), 0)

model = DistributedDataParallel(made(Copied))
train(model, model.parameters(), rank)

model = made(Sharded)
for part in (model.up, model.down, model):
    fully_shard(part, mesh=mesh)
train(model, model.parameters(), rank)

model = First(made(Model)) if rank == 0 else Second(made(Model))
schedule = ScheduleGPipe(PipelineStage(model, rank, 2, torch.device("cpu")), 2, loss_fn=lambda y, t: y.square().mean())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(STEPS):
    schedule.step(batch(step, 0)) if rank == 0 else schedule.step(target=torch.zeros(8, 16))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
# Where each kind's steps begin, what stands before its sites, and whose batches it sees.
KINDS = {"tensor": (0, "", 1), "ddp": (STEPS, "Copied.", 2), "fsdp2": (2 * STEPS, "Sharded.", 2)}


@pytest.fixture(scope="module")
def run(warm_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "train.py").write_text(PROGRAM.replace("MODEL", MODEL).replace("STEPS", str(STEPS)))
    command = ["run", "--out", "out", "--every", "1", "--", "python", RANKS, "2", str(free_port()), "train.py"]
    done = warm_python.narrowgauge(command, cwd=folder, env={**PLAIN, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return open_run(folder / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_sites_are_those_of_the_whole(run, kind):
    before, prefix, whose = KINDS[kind]
    want, _, _ = by_hand(whose)
    check_whole(rows(run, before + STEPS, prefix), want)


def test_stages_stand_side_by_side(run):
    want, _, _ = by_hand(1, microbatches=2)
    table = run.tensors(steps=[4 * STEPS])
    found = {site.partition(".")[2]: i for i, site in enumerate(table["site"].tolist())}
    assert sorted(found) == sorted(want)
    for site in ("up:input", "up:weight", "down:input", "down:weight"):
        i, tensor = found[site], want[site]
        assert (table["rank"][i], table["ranks"][i], table["numel"][i]) == (0, 1, tensor.numel()), site
        assert table["amax"][i] == pytest.approx(tensor.abs().max().item(), rel=1e-4), site


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_norms_are_those_of_the_whole(run, kind):
    before, _, whose = KINDS[kind]
    _, losses, norms = by_hand(whose)
    scalars = run.scalars()
    chosen = slice(before, before + STEPS)
    assert scalars["step"].tolist() == list(range(1, 4 * STEPS + 1))
    assert scalars["loss"][chosen].tolist() == pytest.approx([sum(each) / len(each) for each in losses], rel=1e-4)
    assert scalars["grad_norm"][chosen].tolist() == pytest.approx(norms, rel=1e-4)
    assert set(scalars["tokens"][chosen].tolist()) == {8.0 * whose}


def test_all_of_it_was_merged_and_nothing_disagrees(run):
    assert run.ranks == (0,)
    assert run.meta["ranks"] == {"world": 2, "merged_steps": 4 * STEPS, "apart_steps": 0, "backend": "gloo"}
    assert run.events("replicas_disagree").rows == 0


def test_weights_and_their_norms_are_whole(run):
    torch.manual_seed(1)
    fresh = [nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)]
    norm = torch.stack([layer.weight.norm() for layer in fresh]).norm().item()
    scalars = run.scalars("param_norm")
    for before, _, _ in KINDS.values():
        at = scalars["step"].tolist().index(before + 1)
        assert scalars["param_norm"][at] == pytest.approx(norm, rel=0.05)


def test_the_runs_in_which_a_pipeline_learns_its_shapes_are_no_training(run):
    scalars = run.scalars()
    chosen = scalars["step"] > 3 * STEPS
    tokens = scalars["tokens"][chosen].tolist()
    assert len(tokens) == STEPS
    assert len(set(tokens)) == 1
    assert set(scalars["microbatches"][chosen].tolist()) == {2}
