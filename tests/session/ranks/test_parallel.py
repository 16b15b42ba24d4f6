"""Each kind of parallel training on two real ranks, unedited: the rows of the run are those of the tensors as a whole.

One program trains the same small model four ways, one after the other; the same is trained here by hand, in one piece.
"""

import pytest
import torch
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.test_watch import PLAIN
from torch import nn

from narrowgauge.observe.store import open_run

STEPS = 3
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

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

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

def batch(step, who):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + who))

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
    (folder / "train.py").write_text(PROGRAM.replace("STEPS", str(STEPS)))
    command = ["run", "--out", "out", "--every", "1", "--", "python", RANKS, "2", str(free_port()), "train.py"]
    done = warm_python.narrowgauge(command, cwd=folder, env={**PLAIN, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return open_run(folder / "out")


def batch(step, who):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + who))


def by_hand(whose, microbatches=1):
    """The tensors of the last step of a model in one piece, all batches stacked; its losses and gradient norms."""
    torch.manual_seed(1)
    up, down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
    optimizer = torch.optim.SGD([up.weight, down.weight], lr=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        seen = {name: [] for name in ("up:input", "up:grad_output", "down:input", "down:grad_output")}
        weights = {"up:weight": up.weight.detach().clone(), "down:weight": down.weight.detach().clone()}
        losses.append([])
        batches = [x for who in range(whose) for x in batch(step, who).split(8 // microbatches)]
        for x in batches:
            h = up(x)
            h.retain_grad()
            r = torch.relu(h)
            y = down(r)
            y.retain_grad()
            loss = y.square().mean()
            loss.backward()
            losses[-1].append(loss.item())
            for name, tensor in zip(seen, (x, h.grad, r, y.grad), strict=True):
                seen[name].append(tensor.detach())
        for weight in (up.weight, down.weight):
            weight.grad /= len(batches)
        norms.append(torch.stack([up.weight.grad.norm(), down.weight.grad.norm()]).norm().item())
        optimizer.step()
        optimizer.zero_grad()
    return {name: torch.cat(tensors) for name, tensors in seen.items()} | weights, losses, norms


def rows(run, step, prefix):
    table = run.tensors(steps=[step])
    found = {
        site: {name: table[name][i] for name in ("rank", "ranks", "numel", "amax", "std")}
        for i, site in enumerate(table["site"].tolist())
    }
    return {site.removeprefix(prefix): row for site, row in found.items() if site.startswith(prefix)}


@pytest.mark.parametrize("kind", KINDS)
def test_sites_are_those_of_the_whole(run, kind):
    before, prefix, whose = KINDS[kind]
    want, _, _ = by_hand(whose)
    found = rows(run, before + STEPS, prefix)
    assert sorted(found) == sorted(want)
    for site, tensor in want.items():
        row = found[site]
        assert (row["rank"], row["ranks"], row["numel"]) == (0, 2, tensor.numel()), site
        assert row["amax"] == pytest.approx(tensor.abs().max().item(), rel=1e-4), site
        assert row["std"] == pytest.approx(tensor.double().std(correction=0).item(), rel=1e-4), site


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
