"""What is compiled is told of; in recorded steps a program's graphs run uncompiled, and those of libraries as ever."""

import sys
from types import ModuleType
from weakref import WeakSet

import pytest
import torch
from tests.session.inline import followed
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.store import open_run
from narrowgauge.session.doors.compiled_calls import CompiledCalls
from narrowgauge.session.doors.stance import Uncompiled, stance

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's, of an input


class Ran:
    """A backend that counts how often its graphs run."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.count += 1
            return graph.forward(*args)

        return run


def bent(module):
    """x + x^2, as if it came from a module of that name."""

    def function(x):
        return x + x * x

    function.__module__ = module
    return function


@pytest.mark.parametrize(
    ("module", "eager"), [("transformer_engine.pytorch.jit", 0), ("torch.nn.attention", 0), ("my_model", 2)]
)
def test_what_a_library_compiles_for_itself_runs_as_ever(module, eager, tmp_path, monkeypatch):
    for name in (module, module.partition(".")[0]) if module != "torch.nn.attention" else ():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ran, losses = nn.Sequential(nn.Linear(16, 8), nn.Tanh()), Ran(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=2):
        act = torch.compile(bent(module), backend=ran)  # a library does so at its first call
        for _ in range(5):
            loss = act(model(torch.ones(4, 16))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert ran.count == 5 - eager  # steps 2 and 4 are recorded
    assert losses == sorted(losses, reverse=True)
    assert set(open_run(tmp_path / "run").tensors(["amax"], sites=["0:input"])["step"].tolist()) == {2, 4}


def test_a_compiled_step_of_the_optimizer_is_the_program_s_own(monkeypatch):
    """It lies in torch's module, and is not torch's to compile."""
    monkeypatch.setattr(CompiledCalls, "_wrapped", WeakSet())  # what other tests have left alive
    optimizer = torch.optim.SGD(nn.Linear(16, 8).parameters(), lr=0.1)
    calls = CompiledCalls()
    try:
        assert not calls._heard
        torch.compile(optimizer.step, backend="eager")
        assert calls._heard
    finally:
        calls.close()


def test_a_list_of_modules_that_is_cut_in_a_graph_breaks_nothing(tmp_path):
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            for layer in self.layers[:2]:  # a list of its own, whose making tells torch's hooks
                x = layer(x)
            return x

    with followed(tmp_path, recipe="current", judge="current", every=100, compiling=True) as (session, _):
        model = Some()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            compiled(torch.ones(4, 32)).sum().backward()
            optimizer.step()
    assert session.facts()["steps"] == 2


@pytest.mark.parametrize("nested", [False, True])
def test_a_stance_of_the_programs_and_ours_leave_none_behind(nested):
    theirs, ours = torch.compiler.set_stance, Uncompiled()
    if nested:  # it lies in theirs, and ends behind it
        with theirs("eager_on_recompile"):
            ours.begin()
            assert stance() == "force_eager"
        assert stance() == "default"
        ours.end()
    else:  # theirs begins in ours, and ends behind it
        ours.begin()
        with theirs("eager_on_recompile"):
            ours.end()
            assert stance() == "eager_on_recompile"
        assert stance() == "force_eager"
        ours.look()  # as each call of something compiled does
    assert stance() == "default"
    ours.begin()
    assert stance() == "force_eager"
    ours.end()
    assert stance() == "default"


def test_one_of_ours_that_begins_before_the_last_has_ended_leaves_none_behind():
    ours = Uncompiled()
    ours.begin()
    ours.begin()  # two steps in one call of a compiled function
    assert stance() == "force_eager"
    ours.end()
    assert stance() == "default"


@pytest.mark.parametrize("over", [False, True])
def test_one_of_ours_that_is_paused_comes_back_unless_it_is_over(over):
    ours = Uncompiled()
    assert ours.pause()() is None  # there is none
    ours.begin()
    again = ours.pause()
    assert stance() == "default"
    if over:
        ours.end()
    again()
    assert stance() == ("default" if over else "force_eager")
    ours.end()
    assert stance() == "default"


def test_a_stance_that_the_program_takes_in_a_pause_stays():
    ours = Uncompiled()
    ours.begin()
    again = ours.pause()
    with torch.compiler.set_stance("eager_on_recompile"):
        again()
        assert stance() == "eager_on_recompile"
    ours.end()
    assert stance() == "default"
