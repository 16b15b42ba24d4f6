"""Under autocast, in inductor's graphs: rows are of what the graph's own products multiply, before it is rounded."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor.select_algorithm import extern_kernels

import narrowgauge as ng

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's, of an input
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # inductor's
]
M, STEPS = 24, 3
SHAPES = {"first": (80, 48), "second": (112, 80)}  # [N, K]; no two dimensions are one
ROUNDED = 2.0**-8  # BF16: half of its last digit


class Net(nn.Module):
    """Between its layers all is merged: GELU in BF16, a norm in float32 that stays so."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(K, N) for N, K in SHAPES.values())

    def forward(self, x):
        h = nn.functional.gelu(self.first(x)).float()
        return torch.relu(self.second(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)))


@pytest.fixture
def products(monkeypatch):
    """The factors of each product, as the graph's kernels are given them."""
    found = []

    def heard(name):
        kernel = getattr(extern_kernels, name)

        def run(*args, **kwargs):
            found.append([x.detach().clone() for x in args[-2:]])
            return kernel(*args, **kwargs)

        return run

    for name in ("mm", "addmm"):
        monkeypatch.setattr(extern_kernels, name, heard(name))
    return found


def operands(products):
    """Of every site, its operand."""
    found = {}
    for name, (N, K) in SHAPES.items():
        for a, b in products:
            if (*a.shape, b.shape[1]) == (M, K, N):
                found[f"{name}:input"], found[f"{name}:weight"] = a, b.t()
            elif (*a.shape, b.shape[1]) == (N, M, K):  # of the weight's gradient
                found[f"{name}:grad_output"] = a.t()
    return found


def test_rows_are_of_what_the_kernels_multiply(tmp_path, products):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, config = Net(), tmp_path / "narrowgauge.toml"
    config.write_text('[watch]\nevery = 1\ncompiled = "graphs"\n')
    optimizer, multiplied, given = torch.optim.SGD(net.parameters(), lr=0.1), [], []
    with ng.watch(net, out=tmp_path / "run", config=config):
        compiled = torch.compile(net)
        for _ in range(STEPS):
            products.clear()
            given.append({f"{name}:weight": getattr(net, name).weight.detach().clone() for name in SHAPES})
            given[-1]["first:input"] = x = torch.randn(2, M // 2, 48)
            with torch.autocast("cpu", torch.bfloat16):
                loss = compiled(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            multiplied.append(operands(products))
    run = ng.open_run(tmp_path / "run")
    assert run.meta["notes"] == []
    rows = run.tensors(["numel", "amax", "l2", "mean", "std"])
    assert multiplied[0] == {}  # the first one is uncompiled
    for step in range(1, STEPS):
        assert len(multiplied[step]) == 6
        for site, x in multiplied[step].items():
            assert x.dtype == torch.bfloat16
            (at,) = np.flatnonzero((rows["step"] == step + 1) & (rows["site"] == site))
            row, exactly = {name: rows[name][at] for name in rows}, given[step].get(site)
            assert row["numel"] == x.numel()
            assert torch.tensor(float(row["amax"])).bfloat16() == x.abs().max(), site
            known = x if site.endswith("grad_output") else exactly
            if known is None:  # the norm's float32, which only the graph has: `second:input`
                assert row["l2"] == pytest.approx(x.double().norm().item(), rel=ROUNDED)
                assert row["mean"] == pytest.approx(
                    x.double().mean().item(), abs=ROUNDED * row["l2"] / x.numel() ** 0.5
                )
                assert float(row["amax"]) != float(
                    x.abs().max()
                )  # as the layer is given it, as a converted one quantizes it
                continue
            known = known.double()
            assert float(row["amax"]) == float(known.abs().max())
            assert row["l2"] == pytest.approx(known.norm().item(), rel=1e-6)
            assert row["mean"] == pytest.approx(known.mean().item(), abs=1e-6 * row["l2"])
            assert row["std"] == pytest.approx(known.std(correction=0).item(), rel=1e-6)
