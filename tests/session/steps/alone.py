"""Programs that are left alone between recorded steps, beside the same that are not."""

import gc
import sys
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from torch import nn
from torch.overrides import TorchFunctionMode

from narrowgauge.session.steps.usual import Usual

SAME = "loss", "grad_norm", "lr", "tokens", "microbatches", "param_norm", "update_ratio", "skipped", "loss_scale"
AROUND = [1, 2, 9, 10, 11, 19, 20, 21]  # of 24 steps, recorded every tenth


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """What tests before had compiled is gone: where anything is, our hook for all modules stays in its place."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        with warnings.catch_warnings(action="ignore"):  # of what it imports of torch's own
            torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


class Model(nn.Module):
    """Two layers, alike whenever one is made."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Interrupted(Model):
    """By Ctrl-C, in a notebook say."""

    stops = False

    def forward(self, x):
        if self.stops:
            raise KeyboardInterrupt
        return super().forward(x)


class Refused(torch.autograd.Function):
    """A loss whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise RuntimeError("out of memory")


class Functions(TorchFunctionMode):
    """One of the program's, that is told of each of torch's functions; `seen` are their names."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


class Wrapper(torch.optim.Optimizer):
    """Steps by another, so many times."""

    def __init__(self, inner, times=1):
        super().__init__(inner.param_groups, {})
        self.inner, self.times = inner, times

    def step(self, closure=None):
        for _ in range(self.times):
            self.inner.step()


def batch(number):
    return torch.randn(4 + number % 3, 16, generator=torch.Generator().manual_seed(number))


def made(kind=torch.optim.AdamW):
    model = Model()
    return model, kind(model.parameters(), lr=0.01)


def step(model, optimizer, number, losses, device="cpu"):
    """One of a training with two microbatches, clipping and a falling rate."""
    for part in (0, 1):
        x = batch(2 * number + part).to(device)
        loss = F.mse_loss(model(x), x) / 2
        loss.backward()
        losses.append(loss.item())
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.param_groups[0]["lr"] = 0.01 / number
    optimizer.step()
    optimizer.zero_grad()


def evaluated(model):
    """The loss of a batch that is none of the training's."""
    with torch.no_grad():
        return F.mse_loss(model(batch(100)), batch(100)).item()


def plain(losses, device="cpu"):
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(1, 25):
        step(model, optimizer, number, losses, device)


def run(tmp_path, program, scalars="recorded", **more):
    """What a program wrote and was told, its session, and its writer."""
    losses = []
    watch = {"scalars": scalars, **more.pop("watch", {})}
    with followed(tmp_path, compiling=True, judge="current", watch=watch, **{"every": 10, **more}) as (session, writer):
        program(losses)
    assert not [note for note in session.facts()["notes"] if "failed" in note]
    return losses, session, writer


def told(session, writer):
    """All that does not depend on how long anything took."""
    facts = session.facts()
    notes = [note for note in facts["notes"] if " slower: " not in note]
    counts = session.updates.ended, session.steps.rest.steps
    columns = {name: writer.column(name) for name in (*SAME, "eval_loss", "turn")}
    return facts["steps"], facts.get("skipped_steps"), counts, columns, notes


def compared(tmp_path, program, turns=False, steps=24, **more):
    """A program left alone between recorded steps; all that it has a row of is checked beside one that is not.

    Where optimizers take `turns`, those of steps that are left alone do not count for which steps are recorded.
    """
    alone = []
    program(alone)
    wanted, _, every = run(tmp_path, program, "all", **more)
    found, session, writer = run(tmp_path, program, **more)
    assert found == wanted == alone
    assert session.facts()["steps"] == steps
    with patch.multiple(Usual, begun=lambda *_: None, made=lambda *_: False):
        _, *looked_at = run(tmp_path, program, **more)
    assert told(session, writer) == told(*looked_at)  # each step looked at, none taken to be as the one before
    kept, in_brief, brief = run(tmp_path, program, "loss", **more)
    with patch.multiple(Usual, begun=lambda *_: None, made=lambda *_: False):
        _, *looked_at = run(tmp_path, program, "loss", **more)
    assert kept == wanted
    assert told(in_brief, brief) == told(*looked_at)
    assert set(brief.scalars) == set(every.scalars)
    for name in (*SAME, "eval_loss"):
        there = brief.column(name)
        assert there == {at: every.column(name)[at] for at in there}, name
    assert set(brief.column("lr")) == set(every.column("lr"))
    assert set(writer.scalars) <= set(every.scalars)
    for name in (*SAME, "eval_loss"):
        there = writer.column(name)
        assert there == {at: every.column(name)[at] for at in there}, name
    if turns:
        return session, writer
    for name in SAME:  # nor does anything lack
        assert set(writer.column(name)) == set(every.column(name)) & set(writer.column("microbatches")), name
    assert_same_tensors(writer, every)
    return session, writer


def assert_same_tensors(writer, every):
    """What one recorded is what the other did: the steps, the sites and each number."""
    assert [(at, sites) for at, sites, _ in writer.tensors] == [(at, sites) for at, sites, _ in every.tensors]
    for (_, _, one), (_, _, other) in zip(writer.tensors, every.tensors, strict=True):
        assert set(one) == set(other)
        for name in one:
            assert [str(x) for x in one[name]] == [str(x) for x in other[name]], name


def notes(session):
    return [note for note in session.facts()["notes"] if "watch.scalars" in note]
