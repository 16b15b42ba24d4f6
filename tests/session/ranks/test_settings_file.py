"""A settings file through the command, on two ranks of FSDP2: what each rank recorded, dumped and multiplied.

The program writes down its own tensors, step by step and rank by rank; all that is wanted here is made of these.

x, w, dy    a layer's input, weight (whole) and output's gradient      y = x w' + b    dx = dy w    dw = dy' x
codes       cast(clamp(t * max/amax, -max, max)), max of E4M3 (x, w) or E5M2 (dy)      t ~ codes * amax/max
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.integrations.watched import RANKS
from tests.ports import free_port
from tests.session.test_watch import PLAIN, run

from narrowgauge.observe.report.html import render
from narrowgauge.observe.report.pictures import format_of
from narrowgauge.observe.store import open_run

PROGRAM = """
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 48), nn.Linear(48, 64), nn.Linear(64, 32)

    def forward(self, x):
        self.seen = {}
        for name, layer in (("a", self.a), ("b", self.b), ("c", self.c)):
            y = layer(x)
            self.seen |= {f"{name}.x": x, f"{name}.y": y}
            x = torch.tanh(y)
        return y

torch.manual_seed(0)
net = Net()
for layer in net.children():
    fully_shard(layer)
fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
data = torch.Generator().manual_seed(rank)
for step in range(1, 5):
    held = {f"{name}.{p}": getattr(layer, p).full_tensor() for name, layer in net.named_children()
            for p in ("weight", "bias")}
    x = torch.randn(16 + 16 * rank, 32, generator=data).requires_grad_()
    y = net(x)
    for tensor in net.seen.values():
        tensor.retain_grad()
    (y - x.detach()).square().mean().backward()
    held |= net.seen | {f"{name}.grad": tensor.grad for name, tensor in net.seen.items()}
    held |= {f"{name}.dw": layer.weight.grad.full_tensor() for name, layer in net.named_children()}
    kept = {name: tensor.detach().clone() for name, tensor in held.items()}
    save_file(kept, f"step{step}-rank{rank}.safetensors")
    optimizer.step()
    optimizer.zero_grad()
print("finished")
dist.destroy_process_group()
"""

RECORDS = """
[watch]
every = 2
ranks = true
sites = ["a", "b"]

[[dump]]
sites = ["b"]
steps = [2, "4"]

[[dump]]
sites = ["a:weight"]
steps = "1-4"
cap = "16 KiB"
"""

KEEPS_HIGH = """
[watch]
ranks = true
every = 2

[[high]]
sites = ["a"]

[[high]]
sites = ["b"]
gemms = ["wgrad"]

[[high]]
sites = ["c"]
gemms = ["dgrad"]
roles = ["grad_output"]

[[dump]]
sites = ["b:weight", "c:grad_output"]
steps = 2
"""

pytestmark = pytest.mark.slow  # executed once, by one worker
TOLD = {"input": "x", "weight": "weight", "grad_output": "y.grad"}  # what the program calls it
E4M3, E5M2 = (448.0, torch.float8_e4m3fn), (57344.0, torch.float8_e5m2)


def trained(folder, settings, *words, options=(), warm=None):
    (folder / "narrowgauge.toml").write_text(settings)
    options = ("--config", "narrowgauge.toml", *options)
    env = {**PLAIN, "OMP_NUM_THREADS": "1"}
    done = run(folder, *words, options=options, script=PROGRAM, env=env, warm=warm)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2, done.stdout
    said = {
        (step, rank): load_file(folder / f"step{step}-rank{rank}.safetensors")
        for step in range(1, 5)
        for rank in range(2)
    }
    return SimpleNamespace(out=folder / "out", said=said, err=done.stderr)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()))
    return trained(tmp_path_factory.mktemp("recorded"), RECORDS, *launcher, "train.py")


@pytest.fixture(scope="module")
def converted(tmp_path_factory, warm_python):
    words, options = ("python", RANKS, "2", str(free_port()), "train.py"), ("--convert", "current")
    return trained(tmp_path_factory.mktemp("converted"), KEEPS_HIGH, *words, options=options, warm=warm_python)


def quantized(t, role):
    """Codes and scale by hand."""
    largest, dtype = E5M2 if role == "grad_output" else E4M3
    inverse = torch.tensor(largest) / t.abs().max()  # a number / a tensor is rounded twice
    return (t * inverse).clamp(-largest, largest).to(dtype), inverse.reciprocal()


def back(t, role="input"):
    codes, scale = quantized(t, role)
    return codes.float() * scale


def rows(folder):
    """(step, rank, site) -> numel, amax, l2, sqnr_db."""
    table = open_run(folder).tensors()
    names = ("step", "rank", "site", "numel", "amax", "l2", "sqnr_db")
    return {row[:3]: row[3:] for row in zip(*(table[name].tolist() for name in names), strict=True)}


def by_hand(said, site, parts):
    """The same of a site whose tensors these ranks have."""
    layer, role = site.split(":")
    tensors = [said[part][f"{layer}.{TOLD[role]}"] for part in parts]
    errors = [t.double() - back(t, role).double() for t in tensors]
    square = sum(t.double().square().sum() for t in tensors)
    sqnr = 10 * torch.log10(square / sum(error.square().sum() for error in errors))
    amax = max(t.abs().max().item() for t in tensors)
    return sum(t.numel() for t in tensors), amax, square.sqrt().item(), sqnr.item()


def test_each_rank_has_rows_of_its_own_tensors_beside_those_of_all(recorded):
    sites = [f"{layer}:{role}" for layer in "ab" for role in TOLD]
    own, merged = rows(recorded.out / "ranks"), rows(recorded.out)
    assert set(own) == {(step, rank, site) for step in (2, 4) for rank in (0, 1) for site in sites}
    assert set(merged) == {(step, 0, site) for step in (2, 4) for site in sites}
    for (step, rank, site), row in own.items():
        assert row == pytest.approx(by_hand(recorded.said, site, [(step, rank)]), rel=1e-5), (step, rank, site)
    for (step, _, site), row in merged.items():
        parts = [(step, rank) for rank in ((0,) if site.endswith("weight") else (0, 1))]  # of copies, one
        assert row == pytest.approx(by_hand(recorded.said, site, parts), rel=1e-5), (step, site)
    for rank in (0, 1):
        assert open_run(recorded.out / "ranks").scalars("loss", rank=rank)["step"].tolist() == [1, 2, 3, 4]
        for step in (1, 2, 3, 4):
            said = recorded.said[step, rank]
            loss = (said["c.y"] - said["a.x"]).square().mean().item()
            found = open_run(recorded.out / "ranks").scalars("loss", rank=rank)["loss"][step - 1]
            assert found == pytest.approx(loss, rel=1e-6)
    assert {open_run(recorded.out / name).status for name in ("", "ranks")} == {"complete"}


@pytest.mark.parametrize("name", ["recorded", "converted"])
def test_the_run_of_each_rank_s_rows_says_what_they_are_of(name, request):
    out = request.getfixturevalue(name).out
    own, merged = open_run(out / "ranks"), open_run(out)
    said = ("recipe", "judged_by", "parameters", "baseline_dtype", "weights_hash", "conversion")
    for rank in (0, 1):
        assert {each: own.metas[rank].get(each) for each in said} == {each: merged.metas[rank][each] for each in said}
    assert [format_of(own, role).name for role in TOLD] == ["E4M3FN", "E4M3FN", "E5M2"]
    page = render(None, {"ranks": own})
    assert ("What FP8 would do to the tensors" in page) == (name == "recorded")
    assert "No conversion was recorded" not in page


def test_each_rank_s_dumps_are_its_tensors_their_codes_and_scales_to_the_bit(recorded):
    b = [f"b:{role}" for role in TOLD]
    wanted = {1: ["a:weight"], 2: ["a:weight", *b], 4: b}  # the cap has room for two
    files = {f"step{step:08d}-rank{rank}.safetensors": (step, rank) for step in wanted for rank in (0, 1)}
    assert {path.name for path in (recorded.out / "dumps").iterdir()} == set(files)
    for name, (step, rank) in files.items():
        check_dump(recorded.out / "dumps" / name, recorded.said[step, rank], wanted[step])
    two = [recorded.said[2, rank]["b.x"].shape for rank in (0, 1)]
    assert two == [(16, 48), (32, 48)]  # no rank has the other's
    capped = (
        "narrowgauge: narrowgauge.toml: dump[1]: its cap of 16 KiB was reached at step 3: a:weight has 7.504 KiB more. "
        "Nothing was written for it from there on; give it a larger cap, or fewer sites or steps.\n"
    )
    assert recorded.err.endswith(f"{capped}narrowgauge: the run is in out\n")


def check_dump(path, said, sites):
    dumped = load_file(path)
    assert set(dumped) == {f"{site}.{part}" for site in sites for part in ("x", "codes", "scale")}
    for site in sites:
        layer, role = site.split(":")
        t = said[f"{layer}.{TOLD[role]}"]
        codes, scale = quantized(t, role)
        assert torch.equal(dumped[f"{site}.x"], t), (path, site)
        assert dumped[f"{site}.codes"].dtype == codes.dtype
        assert torch.equal(dumped[f"{site}.codes"].view(torch.uint8), codes.view(torch.uint8)), (path, site)
        assert torch.equal(dumped[f"{site}.scale"], scale), (path, site)


def test_what_the_file_keeps_high_is_the_unconverted_product_to_the_bit(converted):
    for (step, rank), said in converted.said.items():
        x, w, bias, dy, y, dx = tensors(said, "a")  # the whole layer
        assert torch.equal(y, F.linear(x, w, bias)), (step, rank)
        assert torch.equal(dx, dy @ w), (step, rank)
        *_, dy, _, dx = tensors(said, "c")  # one operand of one product: beside it, what w's codes stand for
        assert torch.equal(dx, dy @ back(said["c.weight"])), (step, rank)
    for step in range(1, 5):  # a gemm; gradients of weights are the mean of the ranks', which halves exactly
        ranks = [converted.said[step, rank] for rank in (0, 1)]
        for layer in "ab":
            high = sum(said[f"{layer}.y.grad"].t() @ said[f"{layer}.x"] for said in ranks) / 2
            assert all(torch.equal(said[f"{layer}.dw"], high) for said in ranks), (step, layer)


def test_the_other_products_are_those_of_the_codes(converted):
    for said in converted.said.values():
        for layer in "bc":
            x, w, bias, dy, y, dx = tensors(said, layer)
            assert torch.allclose(y, F.linear(back(x), back(w), bias), rtol=1e-5, atol=1e-6)
            assert (y - F.linear(x, w, bias)).abs().max() > 1e-3
            assert not torch.equal(dx, dy @ w)
            if layer == "b":
                assert torch.allclose(dx, back(dy, "grad_output") @ back(w), rtol=1e-4, atol=1e-8)
    for step in range(1, 5):
        ranks = [converted.said[step, rank] for rank in (0, 1)]
        low = sum(back(said["c.y.grad"], "grad_output").t() @ back(said["c.x"]) for said in ranks) / 2
        high = sum(said["c.y.grad"].t() @ said["c.x"] for said in ranks) / 2
        for said in ranks:
            assert torch.allclose(said["c.dw"], low, rtol=1e-4, atol=1e-7)
            assert not torch.equal(said["c.dw"], high)


def tensors(said, layer):
    return [said[f"{layer}.{name}"] for name in ("x", "weight", "bias", "y.grad", "y", "x.grad")]


def test_the_converted_run_says_what_was_kept_high_and_dumps_each_rank_s_codes(converted):
    assert converted.err.endswith(
        "narrowgauge: 2 of 3 linear layers in FP8 (current, emulated), 1 kept high: a: high= keeps all of its "
        "products\nnarrowgauge: the run is in out\n"
    )
    table = {row["name"]: (row["recipe"], row["reason"]) for row in open_run(converted.out).meta["conversion"]}
    assert table["a"] == (None, "high= keeps all of its products")
    assert {name: why.rpartition("; ")[2] for name, (recipe, why) in table.items() if recipe == "current"} == {
        "b": "wgrad high", "c": "dgrad grad_output high",
    }  # fmt: skip
    for rank in (0, 1):
        path = converted.out / "dumps" / f"step00000002-rank{rank}.safetensors"
        check_dump(path, converted.said[2, rank], ["b:weight", "c:grad_output"])
    own = rows(converted.out / "ranks")
    assert {key[:2] for key in own} == {(step, rank) for step in (2, 4) for rank in (0, 1)}
    for (step, rank, site), row in own.items():
        if site.partition(":")[2] in TOLD:  # beside the results of converted layers
            assert row == pytest.approx(by_hand(converted.said, site, [(step, rank)]), rel=1e-4), (step, rank, site)
