"""Four real ranks in a 2 x 2 mesh, unedited, as they are and converted: the rows of the run are those of the whole.

One program trains the same small model in four ways, one after the other; the same is trained here in one piece.

    Sharded       layers cut along the second dimension, FSDP2 along the first; its last one is not cut
    Replicated    the same, with torch's replication along the first
    Copied        the same, with torch's DDP along the first
    Hybrid        FSDP2 on both dimensions: copies along the first, shards along the second

Hybrid comes last: which ranks see the same data is known by all that they saw.
"""

import pytest
import torch
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.test_watch import PLAIN
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.store import open_run

STEPS = 2
PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.last = nn.Linear(16, 16, bias=False)
    def forward(self, x):
        return self.last(torch.relu(self.down(torch.relu(self.up(x)))))

class Hybrid(Model): pass
class Sharded(Model): pass
class Replicated(Model): pass
class Copied(Model): pass

def made(kind, cut=True):
    torch.manual_seed(1)
    model = kind()
    if cut:
        parallelize_module(model, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model

def batch(step, who):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + who))

kept = []
def train(model, who, clip=False):
    kept.append(model)  # or the next would be taken for it, under the same names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        model(batch(step, who)).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()

who = mesh["outer"].get_local_rank()
for kind, spread in ((Sharded, fully_shard), (Replicated, replicate)):
    model = made(kind)
    for part in (model.up, model.down, model.last, model):
        spread(part, mesh=mesh["outer"])
    train(model, who)

model = made(Copied)
_pre_dp_module_transform(model)
train(DistributedDataParallel(model, process_group=mesh["outer"].get_group()), who)

model = made(Hybrid, cut=False)
for part in (model.up, model.down, model.last, model):
    fully_shard(part, mesh=mesh)
train(model, dist.get_rank(), clip=True)
dist.destroy_process_group()
"""
# What stands before its sites, and whose batches it sees.
KINDS = {"sharded": ("", 2), "replicated": ("Replicated.", 2), "copied": ("Copied.", 2), "hybrid": ("Hybrid.", 4)}


def played(warm_python, folder, *options):
    (folder / "train.py").write_text(PROGRAM.replace("STEPS", str(STEPS)))
    launcher = ["python", RANKS, "4", str(free_port())]
    command = ["run", "--out", "out", "--every", "1", *options, "--", *launcher, "train.py"]
    done = warm_python.narrowgauge(command, cwd=folder, env={**PLAIN, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return open_run(folder / "out")


@pytest.fixture(scope="module")
def run(warm_python, tmp_path_factory):
    return played(warm_python, tmp_path_factory.mktemp("two_dimensions"))


@pytest.fixture(scope="module")
def converted(warm_python, tmp_path_factory):
    return played(warm_python, tmp_path_factory.mktemp("two_converted"), "--convert", "current")


def by_hand(whose, recipe=None, steps=STEPS):
    """The tensors of the last of `steps` of a model in one piece, all batches stacked; its scalars step by step."""
    torch.manual_seed(1)
    sizes = {"up": (16, 32), "down": (32, 16), "last": (16, 16)}
    layers = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    weights = [layer.weight for layer in layers.values()]
    if recipe:
        ng.convert(layers, recipe)
    optimizer = torch.optim.SGD(weights, lr=0.5)
    scalars = {"loss": [], "grad_norm": [], "param_norm": [], "update_ratio": []}
    for step in range(steps):
        seen = {f"{name}:{role}": [] for name in layers for role in ("input", "grad_output")}
        before = {f"{name}:weight": layer.weight.detach().clone() for name, layer in layers.items()}
        losses = []
        for who in range(whose):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + who))
            outputs = []
            for name, layer in layers.items():
                seen[f"{name}:input"].append(x.detach())
                y = layer(x)
                y.retain_grad()
                outputs.append(y)
                x = torch.relu(y)
            loss = y.square().mean()
            loss.backward()
            losses.append(loss.item())
            for name, y in zip(layers, outputs, strict=True):
                seen[f"{name}:grad_output"].append(y.grad)
        for weight in weights:
            weight.grad /= whose
        scalars["loss"].append(sum(losses) / whose)
        scalars["grad_norm"].append(length(weight.grad for weight in weights))
        scalars["param_norm"].append(length(before.values()))
        scalars["update_ratio"].append(0.5 * scalars["grad_norm"][-1] / scalars["param_norm"][-1])
        optimizer.step()
        optimizer.zero_grad()
    return {name: torch.cat(tensors) for name, tensors in seen.items()} | before, scalars


def length(tensors):
    return torch.cat([x.detach().flatten() for x in tensors]).double().norm().item()


def rows(run, kind, step=STEPS):
    """Those of one step of its own, by site without the model's name."""
    prefix, before = KINDS[kind][0], STEPS * list(KINDS).index(kind)
    table = run.tensors(steps=[before + step])
    found = {
        site: {name: table[name][i] for name in ("rank", "ranks", "numel", "amax", "std", "scale_max")}
        for i, site in enumerate(table["site"].tolist())
    }
    return {site.removeprefix(prefix): row for site, row in found.items() if site.startswith(prefix)}


@pytest.mark.parametrize("kind", KINDS)
def test_sites_are_those_of_the_whole(run, kind):
    want, _ = by_hand(KINDS[kind][1])
    found = rows(run, kind)
    assert sorted(found) == sorted(want)
    for site, tensor in want.items():
        row = found[site]
        assert (row["rank"], row["ranks"], row["numel"]) == (0, 4, tensor.numel()), site
        assert row["amax"] == pytest.approx(tensor.abs().max().item(), rel=1e-4), site
        assert row["std"] == pytest.approx(tensor.double().std(correction=0).item(), rel=1e-4), site


@pytest.mark.parametrize("kind", KINDS)
def test_what_both_dimensions_hold_counts_once_in_norms_tokens_and_loss(run, kind):
    whose, begin = KINDS[kind][1], STEPS * list(KINDS).index(kind)
    scalars = run.scalars()
    here = slice(begin, begin + STEPS)
    assert scalars["step"][here].tolist() == list(range(begin + 1, begin + STEPS + 1))
    _, want = by_hand(whose)
    for name, values in want.items():
        if kind == "copied" and name != "loss":  # its parameters are plain tensors: the last one counts on each
            continue
        assert scalars[name][here].tolist() == pytest.approx(values, rel=1e-4), name
    assert scalars["tokens"][here].tolist() == [8.0 * whose] * STEPS


def test_every_step_was_merged_and_nothing_disagrees(run, converted):
    for each in (run, converted):
        steps = STEPS * len(KINDS)
        assert each.meta["ranks"] == {"world": 4, "merged_steps": steps, "apart_steps": 0, "backend": "gloo"}
        assert each.events("replicas_disagree").rows == 0
        assert each.meta["error"] == ""


@pytest.mark.parametrize("kind", KINDS)
def test_converted_layers_are_those_of_the_model_in_one_piece(converted, kind):
    whose, begin = KINDS[kind][1], STEPS * list(KINDS).index(kind)
    want, _ = by_hand(whose, "current", steps=1)
    found = rows(converted, kind, 1)
    # Parts of a layer that is cut have scales of their own.
    within = 1e-6 if kind == "hybrid" else 0.1
    for site, tensor in want.items():
        row = found[site]
        assert (row["ranks"], row["numel"]) == (4, tensor.numel()), site
        assert row["amax"] == pytest.approx(tensor.abs().max().item(), rel=within), site
        assert row["std"] == pytest.approx(tensor.double().std(correction=0).item(), rel=within), site
    assert found["up:weight"]["scale_max"] == pytest.approx(want["up:weight"].abs().max().item() / 448, rel=within)
    assert found["last:output"]["numel"] == want["last:grad_output"].numel()
    _, scalars = by_hand(whose, "current")  # another order of sums is another code here and there
    assert converted.scalars("loss")["loss"][begin : begin + STEPS].tolist() == pytest.approx(scalars["loss"], rel=0.02)
    names = {row["name"] for row in converted.meta["conversion"] if row["recipe"] == "current"}
    assert {f"{KINDS[kind][0]}{layer}" for layer in ("up", "down")} <= names
