"""Pipelines whose stages all number their own layers: each keeps its own rows, and a batch counts once."""

import pytest
import torch
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.test_watch import PLAIN
from torch import nn

from narrowgauge.metrics.stages import Stages
from narrowgauge.observe.store import open_run

STEPS, BATCH, LENGTH = 2, 8, 4
MODEL = """
class Stage(nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.embed = nn.Embedding(16, 16) if number == 0 else nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

def batch(step):
    return torch.randint(16, (8, 4), generator=torch.Generator().manual_seed(step))
"""
PROGRAM = f"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

dist.init_process_group("gloo")
rank = dist.get_rank()
{MODEL}
def loss_of(y, target):
    return (y - target).square().mean()

def train(schedule_of, count):
    numbers = range(rank, count, 2)
    stages = [PipelineStage(Stage(number), number, count, torch.device("cpu")) for number in numbers]
    schedule = schedule_of(stages if count > 2 else stages[0], 2, loss_fn=loss_of)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for step in range({STEPS}):
        schedule.step(batch(step)) if rank == 0 else schedule.step(target=torch.zeros({BATCH}, {LENGTH}, 16))
        optimizer.step()
        optimizer.zero_grad()

train(Schedule1F1B, 2)
train(ScheduleInterleaved1F1B, 4)
train(ScheduleInterleavedZeroBubble, 4)
dist.destroy_process_group()
"""
KINDS = {  # how many stages, and the steps that came before
    "one forward, one backward": (2, 0),
    "two stages a rank": (4, STEPS),
    "backward in halves": (4, 2 * STEPS),
}


def by_hand(count):
    """Tensors of the last step of so many stages, all microbatches stacked; losses and gradient norms of all steps."""
    made = {"nn": nn, "torch": torch}
    exec(MODEL, made)
    stages = [made["Stage"](number) for number in range(count)]
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        seen, hooks = {}, []
        for number, stage in enumerate(stages):
            for at, layer in enumerate(stage.layers):
                site = f"stage{number}.layers.{at}"
                seen[f"{site}:weight"] = [layer.weight.detach().clone()]
                hooks.append(layer.register_forward_hook(noting(seen, site)))
        losses.append(0.0)
        for x in made["batch"](step).split(BATCH // 2):
            for stage in stages:
                x = stage(x)
            loss = x.square().mean() / 2
            (loss * 2).backward()  # each microbatch as it is; what schedules divide are the gradients of the weights
            losses[-1] += loss.item()
        for p in parameters:
            p.grad /= 2
        norms.append(torch.stack([p.grad.norm() for p in parameters]).norm().item())
        optimizer.step()
        optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
    return {site: torch.cat(tensors) for site, tensors in seen.items()}, losses, norms


def noting(seen, site):
    def note(module, args, output):
        seen.setdefault(f"{site}:input", []).append(args[0].detach())
        output.register_hook(seen.setdefault(f"{site}:grad_output", []).append)

    return note


@pytest.fixture(scope="module")
def run(warm_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    (folder / "train.py").write_text(PROGRAM)
    command = ["run", "--out", "out", "--every", "1", "--", "python", RANKS, "2", str(free_port()), "train.py"]
    done = warm_python.narrowgauge(command, cwd=folder, env={**PLAIN, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return open_run(folder / "out")


@pytest.mark.parametrize(("count", "before"), KINDS.values(), ids=KINDS)
def test_layers_of_one_name_are_told_apart(run, count, before):
    want, _, _ = by_hand(count)
    table = run.tensors(steps=[before + STEPS])
    found = {site: i for i, site in enumerate(table["site"].tolist())}
    assert sorted(found) == sorted(want)
    for site, tensor in want.items():
        i, high = found[site], tensor.double()
        assert (table["rank"][i], table["ranks"][i], table["numel"][i]) == (0, 1, tensor.numel()), site
        assert table["amax"][i] == pytest.approx(high.abs().max().item(), rel=1e-5), site
        assert table["amin"][i] == pytest.approx(high.abs()[high != 0].min().item(), rel=1e-4), site
        assert table["std"][i] == pytest.approx(high.std(correction=0).item(), rel=1e-5), site


@pytest.mark.parametrize(("count", "before"), KINDS.values(), ids=KINDS)
def test_a_batch_its_loss_and_norms_are_those_of_the_whole(run, count, before):
    _, losses, norms = by_hand(count)
    scalars = run.scalars()
    chosen = slice(before, before + STEPS)
    assert scalars["tokens"][chosen].tolist() == [BATCH * LENGTH] * STEPS
    assert scalars["microbatches"][chosen].tolist() == [2] * STEPS
    assert scalars["loss"][chosen].tolist() == pytest.approx(losses, rel=1e-5)
    assert scalars["grad_norm"][chosen].tolist() == pytest.approx(norms, rel=1e-5)
    assert run.meta["ranks"]["apart_steps"] == 0


def test_names_of_a_whole_stay_until_two_stages_share_one():
    stages = Stages()
    assert not stages.learn(
        [("layers.0:input", 0), ("layers.1:input", 1), ("layers.0:weight", 0), ("head:input", None)]
    )
    assert stages.names([("layers.1:input", 1)]) == ["layers.1:input"]
    assert stages.learn([("layers.0:input", 1)])
    assert not stages.learn([("layers.0:input", 1)])
    named = stages.names([("layers.1:input", 1), ("head:input", None), ("stage2.0:input", 2), ("(model):input", 3)])
    assert named == ["stage1.layers.1:input", "head:input", "stage2.0:input", "stage3:input"]


def test_stages_of_one_rank_that_share_a_name_tell_that_all_number_their_own():
    assert Stages().learn([("layers.0:input", 0), ("stage2.layers.0:input", 2)])
