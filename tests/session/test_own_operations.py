"""A program that looks at each operation of torch, by a mode or a Tensor class of its own, sees what it does alone."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from narrowgauge.observe.stats import host
from narrowgauge.session.doors import compilations

ROLES = ("input", "weight", "grad_output")
SITES = {f"{name}:{role}" for name in ("0", "2", "projection") for role in ROLES}
SEEN: Counter[str] = Counter()


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        SEEN[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        SEEN[f"{function}, linear: {function is F.linear}, matmul: {function is torch.Tensor.__matmul__}"] += 1
        return super().__torch_function__(function, types, args, kwargs or {})


class Dispatched(torch.Tensor):
    """Its memory is its own: no wrapper of another tensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        SEEN[str(function)] += 1
        with torch._C._DisableTorchDispatch():
            out = function(*args, **(kwargs or {}))
        if function.is_view or not isinstance(out, torch.Tensor) or isinstance(out, cls):
            return out
        return torch.Tensor._make_subclass(cls, out)

    __torch_function__ = torch._C._disabled_torch_function_impl


class Model(nn.Sequential):
    def __init__(self, weights):
        torch.manual_seed(0)
        super().__init__(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.projection = nn.Parameter(torch.randn(16, 16))
        for owner, name in ((self[0], "weight"), (self[2], "weight"), (self, "projection")):
            setattr(owner, name, nn.Parameter(weights(getattr(owner, name).detach())))

    def forward(self, x):
        return self[2](self[1](self[0](x))) @ self.projection


def plain(x):
    return x


def logged(x):
    return x.as_subclass(Logged)


def dispatched(x):
    return torch.Tensor._make_subclass(Dispatched, x)


CASES = {
    "a mode": (plain, plain, Mode),
    "logged batches": (plain, logged, nullcontext),
    "logged weights": (logged, plain, nullcontext),
    "logged batches and weights": (logged, logged, nullcontext),
    "dispatched batches": (plain, dispatched, nullcontext),
}


def train(weights, batches, mode):
    SEEN.clear()
    model = Model(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        with mode():
            loss = model(batches(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                F.mse_loss(model(batches(x)), batches(x))
    return SEEN.copy(), [p.detach().as_subclass(torch.Tensor) for p in model.parameters()]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_it_sees_its_own_operations(tmp_path, monkeypatch, case, compiled):
    if not compiled:  # then everything is counted by operations of torch's
        monkeypatch.setattr(host, "ready", lambda: False)
        monkeypatch.setattr(host, "kernel", lambda: None)
    monkeypatch.setattr(compilations, "graphs", lambda: 0)  # other tests of this process may have made some
    alone, weights = train(*CASES[case])
    with followed(tmp_path, every=2, judge="current", compiling=True) as (session, writer):
        seen, watched = train(*CASES[case])
    assert alone
    assert seen == alone
    assert all(torch.equal(a, b) for a, b in zip(watched, weights, strict=True))
    assert set(writer.column("loss")) == set(writer.column("eval_loss")) == set(writer.column("grad_norm")) == {1, 2, 3}
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}
    assert {site for step, sites, _ in writer.tensors for site in sites if step == 2} >= SITES
    assert not [note for note in session.facts()["notes"] if "failed" in note or "not recorded" in note]
