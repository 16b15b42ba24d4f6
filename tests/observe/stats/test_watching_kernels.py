"""What kernels count while they quantize arrives in a run as what the slow way counts afterwards."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from tests.compute.nn.layers import adopt_all

from narrowgauge.compute.kernels import BACKENDS
from narrowgauge.compute.kernels.fused.watched.looks import Looks
from narrowgauge.compute.nn.linear import set_observer
from narrowgauge.compute.recipes import CURRENT, DELAYED, ROWWISE
from narrowgauge.observe.stats import Collector

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = ("numel", "amax", "amin", "nan_count", "inf_count", "underflow_pct", "saturation_pct", "amax_ratio")
STEPS = 2  # a delayed scale is the table's own in the second
CLOSE = ("mean", "std", "l2", "mse", "sqnr_db", "cosine", "gain", "scale_min", "scale_max")


class Rows:
    def __init__(self):
        self.found = {}

    def add_tensors(self, step, sites, columns):
        for i, site in enumerate(sites):
            self.found[step, site] = {name: column[i] for name, column in columns.items()}

    def add_event(self, step, kind, message, site=None, **data):
        raise AssertionError(message)


def train(recipe, backend, microbatches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32, bias=False)).to(DEVICE)
    table = adopt_all(model, recipe, backend=BACKENDS[backend])
    table.to(torch.device(DEVICE))
    rows = Rows()
    collector = Collector(rows)
    set_observer(model, collector)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        collector.begin_step(step)
        for _ in range(microbatches):
            model(torch.randn(40, 64, device=DEVICE)).square().mean().backward()
        collector.end_step()
        optimizer.step()
        optimizer.zero_grad()
    collector.flush()
    assert not collector.failures
    return rows.found, [p.detach().clone() for p in model.parameters()], table


@pytest.mark.parametrize(("recipe", "microbatches"), [(CURRENT, 1), (CURRENT, 2), (DELAYED, 2), (ROWWISE, 2)])
def test_the_same_rows_and_the_same_training(recipe, microbatches):
    fast, weights, table = train(recipe, "fused", microbatches)
    slow, others, other = train(recipe, "scaled_mm", microbatches)
    for a, b in zip(weights, others, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(table.history, other.history)
    operands = {key for key in slow if key[1].split(":")[1] in ("input", "weight", "grad_output")}
    assert operands <= fast.keys() <= slow.keys()  # of the results, kernels show one in turn
    assert len(operands) == STEPS * 2 * 3
    for key in operands:
        for name in EXACT:
            assert fast[key][name] == pytest.approx(slow[key][name], rel=1e-6, nan_ok=True), (key, name)
        for name in CLOSE:
            assert fast[key][name] == pytest.approx(slow[key][name], rel=1e-4, abs=1e-12, nan_ok=True), (key, name)


def test_a_step_that_could_not_be_packed_leaves_nothing_to_the_next(monkeypatch):
    layer = nn.Sequential(nn.Linear(64, 48)).to(DEVICE)
    adopt_all(layer, CURRENT, backend=BACKENDS["fused"])
    rows = Rows()
    rows.add_event = lambda *args, **data: None
    collector = Collector(rows)
    set_observer(layer, collector)
    pack, failing = Looks.pack, [RuntimeError("out of memory")]
    monkeypatch.setattr(Looks, "pack", lambda looks: pack(looks) if not failing else fail(failing.pop()))
    for step, tokens in enumerate((40, 24)):
        collector.begin_step(step)
        layer(torch.randn(tokens, 64, device=DEVICE)).square().mean().backward()
        collector.end_step()
    collector.flush()
    assert collector.failures == 1
    assert rows.found[1, "0:input"]["numel"] == 24 * 64


def fail(error):
    raise error
