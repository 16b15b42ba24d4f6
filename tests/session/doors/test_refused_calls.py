"""What was compiled before the watch, and fails or returns late, leaves nothing behind in the steps around it."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import narrowgauge as ng
from narrowgauge.observe.store import open_run

SITES = {f"{site}:{role}" for site in ("layer", "head") for role in ("input", "weight", "grad_output")}


class Net(nn.Module):
    """A layer, and a product that is nobody's layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Parameter(torch.ones(8, 16))

    def forward(self, x):
        return F.linear(self.layer(x), self.head)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def refused(helper, then=lambda: None, kept=None):
    """Call what is compiled with `fullgraph=True` where torch makes no graph; the error is caught, or kept."""
    try:
        with FlopCounterMode(display=False):
            helper(torch.ones(3))
        raise RuntimeError  # torch 2.13 on; what is older says nothing
    except RuntimeError as error:
        if kept is not None:
            kept.append(error)
        then()


def elsewhere(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("where", ["before", "in its handler", "kept", "on another thread", "there, kept"])
def test_all_that_runs_behind_a_call_that_torch_refuses_is_seen(where, compiles, tmp_path):
    model, kept, losses = Net(), [], []
    helper = torch.compile(lambda x: 2 * x + 1, backend="eager", fullgraph=True)
    helper(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=2):
        run = torch.compile(model, backend="eager") if compiles else model

        def once():
            loss = run(torch.ones(4, 16)).square().mean()
            loss.backward()
            losses.append(loss.item())

        for _ in range(4):
            once()
            match where:
                case "before":
                    refused(helper)
                    once()
                case "in its handler":
                    refused(helper, then=once)
                case "kept":
                    refused(helper, kept=kept)
                    once()
                case "on another thread":
                    elsewhere(refused, helper)
                    once()
                case "there, kept":
                    elsewhere(refused, helper, lambda: None, kept)
                    once()
            optimizer.step()
            optimizer.zero_grad()
    assert len(losses) == 8
    table = open_run(tmp_path / "run").tensors(["numel"])
    found = dict(zip(zip(table["step"].tolist(), table["site"].tolist(), strict=True), table["numel"], strict=True))
    assert set(found) == {(step, site) for step in (2, 4) for site in SITES}
    assert {found[step, "layer:input"] for step in (2, 4)} == {2 * 4 * 16}
    assert {found[step, "head:input"] for step in (2, 4)} == {2 * 4 * 16}


def test_a_call_of_another_thread_that_returns_behind_the_recorded_step_is_not_refused(tmp_path):
    """It was compiled before the watch, begins in that step, and so uncompiled."""

    def function(x):
        if not torch.compiler.is_compiling() and waits:
            inside.set()
            go_on.wait(60)
        return 2 * x + 1

    waits, inside, go_on, out = [], threading.Event(), threading.Event(), []
    helper = torch.compile(function, backend="eager", fullgraph=True)
    helper(torch.ones(3))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=2):
        run = torch.compile(model, backend="eager")
        for step in range(1, 3):
            loss = run(torch.ones(4, 16)).square().mean()
            if step == 2:
                waits.append(True)
                thread = threading.Thread(target=lambda: out.append(helper(torch.ones(3))))
                thread.start()
                assert inside.wait(60)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        go_on.set()
        thread.join()
    assert [x.tolist() for x in out] == [[3.0, 3.0, 3.0]]


def test_a_long_call_of_another_thread_is_told_of_in_every_step_that_it_lasts(tmp_path):
    @torch.compiler.disable
    def wait():
        inside.set()
        go_on.wait(60)

    inside, go_on, model = threading.Event(), threading.Event(), Net()
    helper = torch.compile(lambda x: (wait(), 2 * x)[1], backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=2):
        thread = threading.Thread(target=helper, args=(torch.ones(3),))
        for step in range(1, 7):
            if step == 3:  # which is not recorded
                thread.start()
                assert inside.wait(60)
            if step == 5:
                go_on.set()
                thread.join()
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    table = run.tensors(["numel"])
    found = set(zip(table["step"].tolist(), table["site"].tolist(), strict=True))
    assert {step for step, site in found if site == "layer:input"} == {2, 4, 6}
    assert {step for step, site in found if site == "head:input"} == {2, 6}
    assert any(
        note.startswith("What is compiled ran in one thread while another was recorded") for note in run.meta["notes"]
    )
