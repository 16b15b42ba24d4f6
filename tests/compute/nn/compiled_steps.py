"""Programs whose optimizer's step is compiled."""

from contextlib import contextmanager

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from narrowgauge.compute.nn.tracing import optimizer_steps


class Plain(torch.optim.Optimizer):
    """A step that torch's compiler gets through in one graph, as those of most libraries."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"])


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "adamw, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.01),
    "plain": lambda params: Plain(params, lr=0.1),
}


def build(kind="plain"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    return model, OPTIMIZERS[kind](list(model.parameters()))


def compiled(way, model, optimizer, backend):
    """One step of training, of which this much is compiled."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

    def backward():
        model(x).square().mean().backward()

    def update():
        optimizer.step()
        if way == "update and zero":
            optimizer.zero_grad()

    def train():
        backward()
        update()

    match way:
        case "step":
            step = torch.compile(optimizer.step, backend=backend)
        case "step in place":
            optimizer.step = torch.compile(optimizer.step, backend=backend)
            step = optimizer.step
        case "scheduled step":
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
            made = torch.compile(optimizer.step, backend=backend)

            def step():
                made()
                schedule.step()

        case "update" | "update and zero":
            step = torch.compile(update, backend=backend)
        case "whole update":
            step = torch.compile(update, backend=backend, fullgraph=True)
        case "two in one":
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            parts = [type(optimizer)(half, lr=optimizer.defaults["lr"]) for half in (weights[:2], weights[2:])]

            @torch.compile(backend=backend)
            def step():
                for part in parts:
                    part.step()

        case "train":
            step, train = (lambda: None), torch.compile(train, backend=backend)
        case "nothing":
            step = update

    def once():
        if way == "train":
            train()
        else:
            backward()
            step()
        optimizer.zero_grad()

    return once


class Counted:
    """A backend, the graphs it was given and the frames that were traced."""

    def __init__(self, name="aot_eager"):
        torch._dynamo.reset()
        counters.clear()
        self.backend = CompileCounterWithBackend(name)

    @property
    def graphs(self):
        return self.backend.frame_count

    @property
    def traced(self):
        return self.backend.frame_count, counters["frames"]["total"]


def run(way, model, optimizer, steps, name="aot_eager"):
    """Train; return the graphs that there were, and whether all had been traced before the last half of the steps."""
    counted = Counted(name)
    once = compiled(way, model, optimizer, counted.backend)
    for _ in range(steps // 2):
        once()
    before = counted.traced
    for _ in range(steps - steps // 2):
        once()
    return counted.graphs, counted.traced == before


@contextmanager
def unheard():
    """As if narrowgauge were not there."""
    known = dict(optimizer_steps._ENDED), dict(optimizer_steps._BEGINS)
    optimizer_steps._ENDED.clear()
    optimizer_steps._BEGINS.clear()
    optimizer_steps._install()
    try:
        yield
    finally:
        optimizer_steps._ENDED.update(known[0])
        optimizer_steps._BEGINS.update(known[1])
        optimizer_steps._install()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
