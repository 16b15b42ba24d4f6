"""On a GPU: layers that nobody converted, counted by our kernels, beside the same tensors counted by hand."""

import math

import pytest
import torch
from tests.session.inline import followed
from tests.session.sites.recorded import counted
from tests.waiting import no_waiting
from torch import nn

import narrowgauge as ng
from narrowgauge.compute.recipes import by_name
from narrowgauge.observe.store import open_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),
]
EXACT, CLOSE = ("numel", "amax", "underflow_pct"), ("mean", "std", "sqnr_db", "gain", "cosine")
DEVICES = ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU"))]


def taught(device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 128, bias=False)).to(device, dtype)
    return model, torch.randn(3, 512, 256, device=device, dtype=dtype)


def kept(model):
    """What the layers see from now on, by site."""
    seen = {}

    def saw(name, layer, args, y):
        seen[f"{name}:input"], seen[f"{name}:weight"] = args[0].detach().clone(), layer.weight.detach().clone()
        y.register_hook(lambda dy: seen.__setitem__(f"{name}:grad_output", dy.detach().clone()))

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda layer, args, y, name=name: saw(name, layer, args, y))
    return seen


def train(model, batches, waits=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(batches):
        with no_waiting(not waits and step == len(batches) - 1):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def check(row, want):
    for name in EXACT:
        assert row[name] == pytest.approx(want[name], rel=1e-6), name
    for name in CLOSE:
        assert row[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), name


def rows(run, step):
    table = run.tensors(steps=[step])
    return {site: {name: table[name][i] for name in table.columns} for i, site in enumerate(table["site"])}


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_those_of_the_same_tensors_by_hand(tmp_path, device):
    """On the second GPU, too, while the first is the current one."""
    model, batches = taught(device)
    with ng.watch(model, out=tmp_path / "run", every=3):
        seen = kept(model)
        train(model, batches)
    run = open_run(tmp_path / "run")
    found = rows(run, 3)
    assert sorted(found) == sorted(seen)
    assert len(seen) == 6
    for site, x in seen.items():
        check(found[site], counted(x.cpu(), site.partition(":")[2]))
    assert not run.events("watch_failed").rows


def test_training_is_the_same_to_the_bit_and_nothing_waits(tmp_path):
    weights = []
    for watched in (False, True):
        model, batches = taught("cuda:0")
        if watched:
            with followed(tmp_path, every=1, judge="current") as (session, writer):
                train(model, batches, waits=False)
            assert {step for step, _, _ in writer.tensors} == {1, 2, 3}
            assert session.hearing.notes == []
        else:
            train(model, batches)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


class Times(nn.Module):
    """Its input times a tensor."""

    def __init__(self, x):
        super().__init__()
        self.x = x

    def forward(self, factor):
        return self.x * factor


def test_no_codes_are_made(tmp_path):
    """Beside what is counted nothing of a tensor's size is launched or allocated."""
    torch.manual_seed(0)
    x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
    linear = nn.Linear(2048, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
    model = nn.Sequential(Times(x), linear)  # a batch of a single number: batches are fingerprinted, in integers
    one = torch.ones(1, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for watched in (False, True):
        with ng.watch(model, out=tmp_path / f"run{watched}", every=1) if watched else torch.enable_grad():
            train(model, [one, one])  # room for sums is taken once
            model(one)  # ends what the optimizer's step left to do
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(one)
            peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] - peaks[0] < x.numel() // 4  # a byte for each code would be four times that


def test_what_other_recipes_would_do(tmp_path):
    (tmp_path / "narrowgauge.toml").write_text(
        '[watch]\nwhat_if = ["current", "delayed", "blockwise", "rowwise", "mxfp8"]\n'
    )
    model, batches = taught("cuda:0")
    with ng.watch(model, out=tmp_path / "run", every=1, config=tmp_path / "narrowgauge.toml"):
        seen = kept(model)
        train(model, batches)
    own = {step: rows(open_run(tmp_path / "run"), step) for step in (1, 2, 3)}
    for site, x in seen.items():
        check(own[3][site], counted(x.cpu(), site.partition(":")[2]))
    for recipe in ("blockwise", "rowwise", "mxfp8"):
        found = rows(open_run(tmp_path / "run" / "what_if" / recipe), 3)
        assert sorted(found) == sorted(seen), recipe
        for site, x in seen.items():
            check(found[site], counted(x.cpu(), site.partition(":")[2], recipe))
    delayed = rows(open_run(tmp_path / "run" / "what_if" / "delayed"), 3)
    for site in seen:
        assumed = max(own[step][site]["amax"] for step in (1, 2))
        fmt = by_name("delayed").uses(site.partition(":")[2])[0].fmt
        assert delayed[site]["scale_max"] == pytest.approx(assumed / fmt.max, rel=1e-6), site
        assert delayed[site]["amax_ratio"] == pytest.approx(own[3][site]["amax"] / assumed, rel=1e-6), site


def test_more_looks_than_there_is_room_for(tmp_path, monkeypatch):
    from narrowgauge.compute.kernels.fused.watched import looks

    monkeypatch.setattr(looks, "LOOKS", 4)
    model, batches = taught("cuda:0")
    with ng.watch(model, out=tmp_path / "run", every=3):
        seen = kept(model)
        train(model, batches)
    found = rows(open_run(tmp_path / "run"), 3)
    assert sorted(found) == sorted(seen)
    for site, x in seen.items():
        check(found[site], counted(x.cpu(), site.partition(":")[2]))


def test_numbers_that_are_not_finite(tmp_path):
    model, batches = taught("cuda:0")
    batches[2, 5, 7], batches[2, 9, 0] = math.inf, math.nan
    with ng.watch(model, out=tmp_path / "run", every=3):
        train(model, batches)
    row = rows(open_run(tmp_path / "run"), 3)["0:input"]
    assert (row["inf_count"], row["nan_count"], row["numel"]) == (1, 1, batches[2].numel())
