"""A layer that is converted as it is called for the first time runs in FP8 from that call on, and is recorded once."""

import copy

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng

STEPS = 3


def data(step):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


class Parts(nn.Module):
    """A model whose parts the program calls, and never it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)


def of_parts(model, x):
    return model.down(model.up(x).cos())


def trained(model):
    """What every step returned, and the weights in the end."""
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        y = of_parts(model, data(step)) if hasattr(model, "up") else model(data(step))
        outputs.append(y.detach())
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(99))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("make", [lambda: nn.Linear(32, 64), Parts], ids=["one layer", "parts"])
def test_its_first_call_is_in_fp8(make, tmp_path):
    before = F.linear
    with followed(tmp_path, recipe="current", every=1, judge="current") as (_, writer):
        model = make()
        by_hand = copy.deepcopy(model)
        found = trained(model)
    assert F.linear is before
    ng.convert(by_hand, "current")
    for ours, wanted in zip(found, trained(by_hand), strict=True):
        for a, b in zip(ours, wanted, strict=True):
            assert torch.equal(a, b)
    rows = {}
    for step, sites, columns in writer.tensors:
        for n, site in enumerate(sites):
            rows[step, site] = columns["numel"][n]
    layers = {"(model)": (32, 64)} if isinstance(model, nn.Linear) else {"up": (32, 64), "down": (64, 32)}
    for step in range(1, STEPS + 1):
        for name, (K, N) in layers.items():
            sizes = {"input": 16 * K, "weight": N * K, "grad_output": 16 * N}
            assert {role: rows[step, f"{name}:{role}"] for role in sizes} == sizes


def test_a_first_call_that_raises_leaves_torch_as_it_was(tmp_path):
    model, before, seen = nn.Linear(32, 64), F.linear, []
    model.register_forward_pre_hook(lambda module, args: seen.append(F.linear) or 1 / 0)
    with followed(tmp_path, recipe="current"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ZeroDivisionError):
            model(data(0))
        assert seen != [before]
        assert F.linear is before
        optimizer.zero_grad()


def test_products_of_other_weights_are_as_they_are(tmp_path):
    model, other, found = nn.Linear(32, 64), torch.randn(64, 32), []
    by_hand, _ = ng.convert(copy.deepcopy(model), "current")

    def before(module, args):
        found.extend((F.linear(args[0], other), F.linear(input=args[0], weight=other)))

    model.register_forward_pre_hook(before)
    with followed(tmp_path, recipe="current"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        y = model(data(0))
        optimizer.zero_grad()
    assert all(torch.equal(x, F.linear(data(0), other)) for x in found)
    assert torch.equal(y, by_hand(data(0)))
