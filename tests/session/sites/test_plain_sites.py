"""Plain linear layers in a watched program: counted as the same tensors are by hand, in recorded steps alone."""

import sys
from contextlib import contextmanager

import pytest
import torch
from tests.session.test_watch import run
from torch import nn

import narrowgauge as ng
from narrowgauge.compute.kernels.reference import Reference
from narrowgauge.compute.recipes import by_name
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter, open_run
from narrowgauge.session.recorder import Recorder
from narrowgauge.session.sites import known, linear
from narrowgauge.session.sites.plain_sites import PlainSites

PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        return self.b(checkpoint(lambda x: torch.relu(self.a(x)), x, use_reentrant=REENTRANT))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    for micro in range(2):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + micro)).requires_grad_()
        ((model(x) - x).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.full((32, 64), 1e4))
"""


def by_hand(step):
    """The tensors of one step of PROGRAM, both microbatches stacked, by site."""
    torch.manual_seed(0)
    a, b = nn.Linear(64, 128), nn.Linear(128, 64)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    for now in range(step):
        seen = {name: [] for name in ("a:input", "a:grad_output", "b:input", "b:grad_output")}
        weights = {"a:weight": a.weight.detach().clone(), "b:weight": b.weight.detach().clone()}
        for micro in range(2):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * now + micro))
            h = a(x)
            h.retain_grad()
            r = torch.relu(h)
            y = b(r)
            y.retain_grad()
            ((y - x).square().mean() / 2).backward()
            for name, tensor in (("a:input", x), ("a:grad_output", h.grad), ("b:input", r), ("b:grad_output", y.grad)):
                seen[name].append(tensor.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {name: torch.cat(tensors) for name, tensors in seen.items()} | weights


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_program_that_converts_nothing_shows_what_fp8_would_do(warm_python, tmp_path, reentrant):
    script = PROGRAM.replace("REENTRANT", str(reentrant))
    done = run(tmp_path, "train.py", options=("--every", "3"), script=script, warm=warm_python)
    assert (done.returncode, done.stderr) == (0, "narrowgauge: the run is in out\n")
    table = open_run(tmp_path / "out").tensors()
    columns = (table[name] for name in ("step", "numel", "amax", "std"))
    found = dict(zip(table["site"].tolist(), zip(*columns, strict=True), strict=True))
    want = by_hand(3)
    assert sorted(found) == sorted(want)
    for site, tensor in want.items():
        step, numel, amax, std = found[site]
        assert (step, numel) == (3, tensor.numel()), site
        assert amax == pytest.approx(tensor.abs().max().item(), rel=1e-6), site
        assert std == pytest.approx(tensor.double().std(correction=0).item(), rel=1e-5), site


def test_errors_are_those_of_the_recipe(tmp_path):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32), torch.randn(16, 64)
    with RunWriter(tmp_path / "run", {}) as writer:
        collector = Collector(writer, every=1)
        sites = PlainSites("rowwise", eager=False, training=lambda: True)
        assert sites.add(nn.Sequential(layer), collector) == ["0"]
        collector.begin_step(1)
        sites.begin()
        layer(x)
        sites.end()
        collector.flush()
    table = open_run(tmp_path / "run").tensors()
    rule = by_name("rowwise").uses("input")[0]
    q = ng.quantize(x, rule.fmt, granularity=rule.granularity)
    want = ng.measure(x, q)
    row = table["site"].tolist().index("0:input")
    assert table["sqnr_db"][row] == pytest.approx(want["sqnr_db"], rel=1e-6)
    assert table["gain"][row] == pytest.approx(want["gain"], rel=1e-6)


def test_a_tensor_with_a_nan_is_recorded_and_nothing_is_quantized_for_others(tmp_path, monkeypatch):
    layer, x = nn.Linear(16, 32), torch.randn(8, 16)
    writer = RunWriter(tmp_path / "run", {})
    collector = Collector(writer)
    sites = PlainSites("current", eager=True, training=lambda: True)
    sites.add(nn.Sequential(layer), collector)
    quantized = []
    real = Reference.quantize_both
    monkeypatch.setattr(
        Reference, "quantize_both", staticmethod(lambda x, *a, **k: quantized.append(x) or real(x, *a, **k))
    )
    for step in range(2):
        collector.begin_step(step)
        sites.begin()
        layer(x).sum().backward()
        sites.end()
        if step == 0:
            assert quantized == []
            x[2, 3] = torch.nan
    collector.flush()
    writer.close()
    assert sites.notes == []
    assert len(quantized) == 1  # the input; weight and gradient are what they were
    table = open_run(tmp_path / "run").tensors(columns=["nan_count", "numel"])
    rows = {
        (step, site): (nan, n)
        for step, site, nan, n in zip(*(table[c].tolist() for c in ("step", "site", "nan_count", "numel")), strict=True)
    }
    assert rows == {
        (step, f"0:{role}"): (int(step == 1 and role == "input"), numel)
        for step in range(2)
        for role, numel in (("input", 128), ("weight", 512), ("grad_output", 256))
    }


def test_steps_that_are_not_recorded_have_no_hooks():
    model = nn.Sequential(nn.Linear(8, 8))
    sites = PlainSites("current", eager=False, training=lambda: True)
    sites.add(model, Collector(None, every=1))
    assert not model[0]._forward_hooks
    sites.begin()
    assert len(model[0]._forward_hooks) == 1
    sites.end()
    assert not model[0]._forward_hooks


def test_what_a_kind_has_to_hear_beside_its_layers_is_heard_once_from_the_first_of_them_on(monkeypatch):
    open_now = []

    class Hears(linear.Plain):
        @contextmanager
        def heard(self):
            open_now.append(self)
            yield
            open_now.remove(self)

    monkeypatch.setattr(known, "KINDS", (Hears(),))
    sites = PlainSites("current", eager=False, training=lambda: True)
    found = []
    for _ in range(2):
        sites.begin()
        found.append(len(open_now))
        for model in (nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))):
            sites.add(model, Collector(None, every=1))
            found.append(len(open_now))
            assert model[0]._forward_hooks
        sites.end()
        found.append(len(open_now))
    assert found == [0, 1, 1, 0, 1, 1, 1, 0]


def test_losses_are_the_same_to_the_last_bit(warm_python, tmp_path):
    script = PROGRAM.replace("REENTRANT", "False") + "print([p.sum().item() for p in model.parameters()])\n"
    done = run(tmp_path, "train.py", options=("--every", "1"), script=script, warm=warm_python)
    plain = warm_python.run([sys.executable, "train.py"], cwd=tmp_path)
    assert plain.stdout
    assert done.stdout == plain.stdout


SETTINGS = '[watch]\nwhat_if = ["rowwise"]\nskip = ["2:weight"]\n'


@pytest.mark.parametrize("what_if", [True, False])
def test_the_short_way_of_plain_tensors_leaves_what_the_long_one_does(what_if, tmp_path, monkeypatch):
    def train(folder):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 48), nn.Flatten(0, 1), nn.Linear(48, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = tmp_path / "narrowgauge.toml"
        config.write_text(SETTINGS if what_if else "")
        with ng.watch(model, out=folder, every=1, config=config):
            for step in range(3):
                for _ in range(2):
                    x = torch.randn(5, 16, 64)
                    x[0, 0, 0] = torch.inf if step == 2 else 1.0
                    with torch.autocast("cpu", torch.bfloat16, enabled=step == 1):
                        model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [open_run(path).tensors() for path in (folder, *sorted(folder.glob("what_if/*")))]

    asked = []
    product = Recorder.product
    monkeypatch.setattr(Recorder, "product", lambda *args, **own: asked.append(args[1:3]) or product(*args, **own))
    short = train(tmp_path / "short")
    assert {role for _, role in asked} == {"input", "weight", "grad_output"}
    monkeypatch.delattr(Recorder, "product")
    long = train(tmp_path / "long")
    assert len(short) == len(long) >= 1
    for one, other in zip(short, long, strict=True):
        assert sorted(set(one["site"])) == sorted(set(other["site"]))
        assert ("2:weight" in set(one["site"])) != what_if
        for name in one:
            if name != "time":
                assert repr(one[name].tolist()) == repr(other[name].tolist()), name
