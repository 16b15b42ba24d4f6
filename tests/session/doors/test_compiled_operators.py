"""Operators of torch's that take functions (`torch.cond`) keep the gradients of what these read, in every step."""

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import narrowgauge as ng

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's, of an input
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # inductor's
]
STEPS = 6
cond = torch.cond
map_, scan = (getattr(import_module(f"torch._higher_order_ops.{name}"), name) for name in ("map", "scan"))


class Net(nn.Module):
    """Reads what it trains inside of a function that an operator is given."""

    def __init__(self, operator):
        super().__init__()
        self.up, self.other, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale, self.operator = nn.Parameter(torch.randn(16)), operator

    def forward(self, x):
        match self.operator:
            case "cond":
                h = cond(x.sum() > 0, lambda x: self.up(x * self.scale), lambda x: self.other(x).relu(), (x,))
            case "map":
                h = map_(lambda row: self.up(row * self.scale), x)
            case "scan":
                h = self.up(scan(lambda sum_, row: ((sum_ + row).tanh(), sum_ * self.scale), torch.zeros(16), x)[1])
        return self.down(h)


def train(operator, compiles, folder=None, **options):
    """The gradients of each step, and how many graphs it took, of a model that is watched into a folder or is not."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net, found = Net(operator), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with nullcontext() if folder is None else ng.watch(net, out=folder, **options):
        run = torch.compile(net, backend="aot_eager", fullgraph=True) if compiles else net
        for _ in range(STEPS):
            x = torch.randn(8, 16)
            (run(x) - x).square().mean().backward()
            found.append({name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return found, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("how", ["eager", "uncompiled", "graphs"])
@pytest.mark.parametrize("operator", ["cond", "map", "scan"])
def test_each_weight_has_the_gradient_that_it_has_without_us(operator, how, tmp_path):
    alone, graphs = train(operator, how != "eager")
    (tmp_path / "ng.toml").write_text(f'[watch]\ncompiled = "{"uncompiled" if how == "eager" else how}"\n')
    found, with_us = train(operator, how != "eager", tmp_path / "run", every=2, config=tmp_path / "ng.toml")
    for step, (got, want) in enumerate(zip(found, alone, strict=True), 1):
        assert {name for name, dw in got.items() if dw is None} == {name for name, dw in want.items() if dw is None}
        for name, dw in want.items():
            if dw is not None:
                torch.testing.assert_close(got[name], dw, msg=f"step {step}: {name}")
    assert any(dw["scale"].any() for dw in alone)
    if how == "eager":
        assert with_us == graphs  # the operator's own
    run = ng.open_run(tmp_path / "run")
    assert set(run.tensors(["amax"], sites="down:grad_output")["step"].tolist()) == {2, 4, 6}
    if operator != "scan":  # layers in it are not seen
        assert any(note.startswith("Not seen as a weight in any recorded step: Linear") for note in run.meta["notes"])
