"""Programs that compile their model in one way or another, trained and watched."""

import copy
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.session.doors.compilations import Compilations

STEPS, EVERY = 8, 2


class Compiles(Compilations):
    """What a program compiles, of which nothing is run: whether there is any, and whether torch tells of its calls."""

    def __init__(self, *, some=True, told=False):
        self.any, self.told = (lambda: some), (lambda: told)


class Block(nn.Module):
    """Two linear layers, of whose results one is changed in place."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.up(self.norm(x))
        h.relu_()
        return x + self.down(input=h)


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, width=32, blocks=2, reentrant=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Counting:
    """A backend, and how many graphs it was given."""

    def __init__(self, name="aot_eager"):
        self.graphs, self._make = 0, torch._dynamo.lookup_backend(name)

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self._make(graph, inputs)


def compiled(net, how, backend, **options):
    """What a program calls of tokens [B, T] for a loss, once it has compiled the net."""
    match how:
        case "module":
            run = torch.compile(net, backend=backend, **options)
        case "in place":
            run = net
            net.compile(backend=backend, **options)
        case "blocks":
            run = net
            for block in net.blocks:
                block.compile(backend=backend, **options)
        case "function":
            return torch.compile(lambda tokens: net(tokens).square().mean(), backend=backend, **options)
    return lambda tokens: run(tokens).square().mean()


def tokens_of(step, part=0, length=16):
    """Other ones for each step."""
    return torch.randint(0, 64, (4, length), generator=torch.Generator().manual_seed(100 * step + part))


def train(net, loss_of, *, microbatches=1, around=nullcontext, then=lambda step: None, lengths=(16,)):
    """Train for STEPS steps; the losses."""
    optimizer, losses = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), []
    for step in range(STEPS):
        for part in range(microbatches):
            with around():
                loss = loss_of(tokens_of(step, part, lengths[step % len(lengths)]))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        then(step)
    return losses


def watched(folder, net, how, backend, way, options=None, **training):
    """Compile and train a copy of the net under a watch that records in this way; its losses and the run."""
    torch._dynamo.reset()
    folder.mkdir()
    config = folder / "narrowgauge.toml"
    config.write_text(f'[watch]\nevery = {EVERY}\ncompiled = "{way}"\n')
    net = copy.deepcopy(net)
    with ng.watch(net, out=folder / "run", config=config):
        losses = train(net, compiled(net, how, backend, **(options or {})), **training)
    return losses, ng.open_run(folder / "run")


COLUMNS = ("numel", "amax", "mean", "std", "sqnr_db", "gain")


def same_rows(one, other):
    """Both runs have the same rows, with the same numbers but for a graph's own rounding."""
    a, b = one.tensors(COLUMNS), other.tensors(COLUMNS)
    assert a["site"].tolist() == b["site"].tolist()
    assert a["step"].tolist() == b["step"].tolist()
    assert len(a["step"])
    for name in COLUMNS:
        np.testing.assert_allclose(b[name], a[name], rtol=1e-4, atol=1e-7, err_msg=name)


def notes(run):
    """What the run says, but for what it says of every program here."""
    return [note for note in run.meta["notes"] if "DataLoader" not in note and "Embedding" not in note]
