"""Layers, observers and backends that the tests of Fp8Linear share."""

import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.compute.kernels import BACKENDS, Reference
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.nn.scaling.clock import StepClock
from narrowgauge.compute.nn.scaling.scale_table import ScaleTable
from narrowgauge.compute.recipes import CURRENT


def adopt(module, recipe=CURRENT, *, name="layer", backend=None, table=None, clock=None):
    """Convert one nn.Linear and return it."""
    Fp8Linear.adopt(
        module,
        name=name,
        recipe=recipe,
        backend=backend or BACKENDS["reference"],
        table=table if table is not None else ScaleTable(),
        clock=clock or StepClock(),
    )
    return module


def adopt_all(model, recipe=CURRENT, **kwargs):
    """Convert every nn.Linear of `model`, with one table and one clock; return the table."""
    table, clock = ScaleTable(), StepClock()
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            adopt(module, recipe, name=name, table=table, clock=clock, **kwargs)
    return table


def sqnr_db(exact, got):
    exact, got = exact.detach().double(), got.detach().double()
    return float(10 * torch.log10(exact.square().sum() / (exact - got).square().sum()))


def calc_diff(x, y):
    x, y = x.detach().double(), y.detach().double()
    return float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))


class Seen:
    """An observer that keeps everything: (module, role) -> list of what was handed over."""

    def __init__(self, wanted=True):
        self.wanted = wanted
        self.operands, self.results = {}, {}

    def wants(self, module):
        return self.wanted

    def look(self, module, role, x, rule, turned):
        return None

    def operand(self, module, role, x, q, moments=None, amax_ratio=None):
        self.operands.setdefault((module, role), []).append((x, q, amax_ratio))

    def result(self, module, role, y, check):
        self.results.setdefault((module, role), []).append((y, check))

    def counts(self):
        """How often each site was seen."""
        return {site: len(seen) for site, seen in sorted({**self.operands, **self.results}.items())}


class Counting(Reference):
    """The reference backend, counting its gemms and optionally scaling their results by a planted gain."""

    name = "counting"

    def __init__(self, gain=1.0):
        self.shapes, self.gain = [], gain

    def refuses(self, recipe, n, k):
        return None

    def gemm(self, a, b, out_dtype, **kwargs):
        self.shapes.append((*a.shape, b.shape[0]))
        return super().gemm(a, b, out_dtype, **kwargs) * self.gain


def train_on(model, call, shapes, microbatches=1, dtype=torch.float32):
    """A step per shape of x; everything that came out of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    found = []
    for shape in shapes:
        for _ in range(microbatches):
            x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
            y = call(x)
            y.backward(torch.randn(y.shape, generator=generator).to(dtype))
            found += [y.detach(), x.grad]
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + list(ng.scaling_state(model).values())


def assert_same(found, want):
    assert len(found) == len(want)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
