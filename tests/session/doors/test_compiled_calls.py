"""What is compiled is told of; in recorded steps a program's graphs run uncompiled, and those of libraries as ever."""

import functools
import gc
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
from narrowgauge.session.doors.stance import stance

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's, of an input
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # its import's
]


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
    ("module", "eager"),
    [("transformer_engine.pytorch.jit", 0), ("torch.nn.attention", 0), ("torchao.optim.adam", 0), ("my_model", 2)],
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


def test_a_compiled_step_is_not_taken_for_something_older(tmp_path):
    """Nor are layers that never run said to be hidden in it."""

    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.runs, self.rests = nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x):
            return self.runs(x)

    torch._dynamo.reset()
    model, ran = Some(), Ran()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=2):
        step = torch.compile(optimizer.step, backend=ran)
        for _ in range(4):
            model(torch.ones(4, 16)).square().mean().backward()
            step()
            optimizer.zero_grad()
    assert ran.count == 4
    notes = [note for note in open_run(tmp_path / "run").meta["notes"] if "DataLoader" not in note]
    assert len(notes) == 1
    assert notes[0].startswith("Not seen as a weight in any recorded step: Linear (1 of them")


def test_a_compiled_step_that_is_given_a_closure_runs_uncompiled_in_recorded_steps(tmp_path):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ran, losses, graphs = nn.Sequential(nn.Linear(16, 8)), Ran(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16)).square().mean()
        loss.backward()
        return loss

    with ng.watch(model, out=tmp_path / "run", every=2):
        step = torch.compile(optimizer.step, backend=ran)
        for _ in range(4):
            before = ran.count
            losses.append(step(closure).item())
            graphs.append(ran.count > before)
    run = open_run(tmp_path / "run")
    table = run.tensors(["numel"], sites=["0:input"])
    assert dict(zip(table["step"].tolist(), table["numel"].tolist(), strict=True)) == {2: 64, 4: 64}
    assert run.scalars("loss")["loss"].tolist() == pytest.approx(losses)
    assert graphs == [True, False] * 2
    assert not [note for note in run.meta["notes"] if "DataLoader" not in note]


def test_where_hearing_of_a_call_fails_what_runs_uncompiled_does_so_again_behind_it(monkeypatch):
    class Fails:
        def compiled_runs(self, whose):
            raise KeyError(whose)

        def compiled_unheard(self, error):
            errors.append(error)

    errors, ran = [], Ran()
    torch._dynamo.reset()
    older = torch.compile(bent("my_model"), backend=ran)
    calls = CompiledCalls()
    try:
        calls.graphs = Fails()
        assert calls.told()
        with calls.eagerly():
            assert older(torch.ones(1)) == 2
            assert stance() == "force_eager"
        assert stance() == "default"
    finally:
        calls.close()
    assert ran.count == 0
    assert [str(error) for error in errors] == ["'unheard'"]


class Trainer:
    """Holds a model, which one of its methods calls."""

    def __init__(self, model):
        self.model = model

    def forward(self, x):
        return self.model(x)

    def through_another(self, x):
        return self.forward(x)

    def distance(self, y):
        return y.square().mean()

    def lambda_(self):
        return lambda x: self.model(x)


class Net(nn.Sequential):
    """Has a method beside its forward, which calls it."""

    def itself(self, x):
        return self(x)


@pytest.mark.parametrize(
    "what", ["module", "function", "given", "partial", "held", "method", "methods", "itself", "helper", "beside"]
)
def test_a_model_that_trained_before_it_was_compiled_breaks_no_graph_and_its_calls_are_heard(tmp_path, what):
    torch._dynamo.reset()
    model, ran = Net(nn.Linear(16, 8), nn.Tanh()), Ran()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def call(x):
        return model(x)

    def distance(y):
        return y.square().mean()

    def given(module, x):
        return module(x)

    trainer = Trainer(model)
    compiles = {"module": model, "function": call, "given": given, "method": trainer.forward}
    compiles |= {"held": trainer.lambda_()}
    compiles |= {"partial": functools.partial(given, model), "methods": trainer.through_another, "itself": model.itself}
    helpers = {"helper": distance, "beside": trainer.distance}
    with ng.watch(model, out=tmp_path / "run", every=100):
        forward, loss, evaluated = model, distance, []
        for step in range(4):
            if step == 1 and what in helpers:
                loss = torch.compile(helpers[what], backend=ran, fullgraph=True)
            elif step == 1:
                forward = torch.compile(compiles[what], backend=ran, fullgraph=True)
            inputs = (*[model] * (step > 0 and what == "given"), torch.ones(4, 16))
            loss(forward(*inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                evaluated.append(nn.functional.mse_loss(forward(*inputs), torch.ones(4, 8)).item())
    assert ran.count == (3 if what in helpers else 6)
    found = open_run(tmp_path / "run").scalars(["tokens", "eval_loss"])
    assert found["tokens"].tolist() == [4.0] * 4
    assert found["eval_loss"].tolist() == pytest.approx(evaluated)


@pytest.mark.parametrize("what", ["helper", "given", "teacher"])
def test_what_is_compiled_and_calls_no_model_that_trains_makes_no_evaluation(tmp_path, what):
    torch._dynamo.reset()
    model, other = nn.Sequential(nn.Linear(16, 8), nn.Tanh()), nn.Linear(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def average(ours, theirs):
        for own, averaged in zip(ours.parameters(), theirs.parameters(), strict=True):
            averaged.lerp_(own, 0.1)

    def largest(y):
        return y.abs().max()

    def taught(x):
        return other(x)

    x = torch.ones(4, 16)
    with ng.watch(model, out=tmp_path / "run", every=100):
        compiled = torch.compile({"helper": largest, "given": average, "teacher": taught}[what], backend="eager")
        for _ in range(3):
            out = model(x)
            with torch.no_grad():
                compiled(*{"helper": [out.detach()], "given": [model, other], "teacher": [x]}[what])
            nn.functional.mse_loss(out, torch.zeros(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                nn.functional.l1_loss(out.detach(), torch.zeros(4, 8))
    run = open_run(tmp_path / "run")
    assert "eval_loss" not in run.scalars()
    assert run.scalars("tokens")["tokens"].tolist() == [4.0] * 3


def test_a_compiled_function_is_the_call_of_each_model_that_it_is_given(tmp_path):
    torch._dynamo.reset()
    large, small, fixed = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), nn.Linear(16, 16), nn.Linear(16, 16)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (small, large)]
    with ng.watch(out=tmp_path / "run", every=1):
        call = torch.compile(lambda before, module, x: module(before(x)), backend="eager")
        for _ in range(2):
            for model, optimizer in zip((small, large), optimizers, strict=True):
                call(fixed, model, torch.ones(4, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    assert run.meta["models"] == 2
    assert {"(model)", "Sequential.0", "Sequential.1"} <= {site.partition(":")[0] for site in run.sites}


def test_a_wrapper_that_trained_before_a_compiled_function_called_it_is_one_model(tmp_path):
    torch._dynamo.reset()
    wrapped = nn.DataParallel(nn.Sequential(nn.Linear(16, 8), nn.Tanh()))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with ng.watch(out=tmp_path / "run", every=2):
        call = torch.compile(lambda x: wrapped(x), backend="eager")
        for forward in (wrapped, call, wrapped, call):
            forward(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    assert run.meta["models"] == 1
    assert run.scalars("tokens")["tokens"].tolist() == [4.0] * 4
    assert {site.partition(":")[0] for site in run.sites} == {"0"}


def test_a_state_that_a_compiled_function_is_given_evaluates_the_model_in_it(tmp_path):
    torch._dynamo.reset()
    model, evaluated = nn.Sequential(nn.Linear(16, 8), nn.Tanh()), []
    state, optimizer = Trainer(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.watch(model, out=tmp_path / "run", every=100):
        evaluate = torch.compile(lambda held, x: held.model(x).square().mean(), backend="eager")
        for _ in range(3):
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                y = evaluate(state, torch.ones(4, 16))
                evaluated.append(nn.functional.mse_loss(y, torch.zeros(())).item())
    assert open_run(tmp_path / "run").scalars("eval_loss")["eval_loss"].tolist() == pytest.approx(evaluated)


def test_a_compiled_loss_with_a_penalty_of_the_weights_is_no_second_call_of_their_model(tmp_path):
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)), torch.ones(4, 8, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def penalized(y, target):
        return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()) + sum(
            p.square().sum() for p in model.parameters()
        )

    with ng.watch(model, out=tmp_path / "run", every=100):
        loss = torch.compile(penalized, backend="eager")
        for _ in range(3):
            loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert open_run(tmp_path / "run").scalars("tokens")["tokens"].tolist() == [32.0] * 3


def test_a_function_at_the_address_of_one_that_is_gone_is_another(tmp_path):
    model, x = nn.Linear(8, 4), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def compiled(function):
        torch._dynamo.reset()
        gc.collect()
        return torch.compile(function, backend="eager")

    with ng.watch(model, out=tmp_path / "run", every=100):
        for _ in range(6):
            compiled(lambda y: y.square().mean())(model(x)).backward()
            optimizer.step()
            compiled(lambda x: model(x))(x).square().mean().backward()
            optimizer.step()
    assert open_run(tmp_path / "run").scalars("tokens")["tokens"].tolist() == [4.0] * 12


def test_what_is_compiled_and_runs_in_a_models_call_or_a_backward_pass_is_no_model_of_its_own(tmp_path):
    torch._dynamo.reset()

    class Model(nn.Linear):
        def forward(self, x):
            y = call(inner, super().forward(x))
            y.register_hook(torch.enable_grad()(lambda dy: call(in_backward, dy).detach()))
            return y

    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        call = torch.compile(lambda module, x: module(x), backend="eager")
        model, inner, in_backward = Model(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = torch.optim.SGD([p for m in (model, inner, in_backward) for p in m.parameters()], lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert writer.column("tokens") == {1: 4.0, 2: 4.0}
    assert session.facts()["models"] == 1
    assert not session.hearing.notes


ALONE = "2 losses of models that do not train (an averaged copy, say) are eval_loss"
METRICS = "2 losses were computed without gradients of batches that train"


@pytest.mark.parametrize(
    ("what", "gradients", "told"),
    [("module", False, ALONE), ("function", False, ALONE), ("given", False, ALONE), ("function", True, METRICS)],
)
def test_a_compiled_call_of_a_model_that_does_not_train(tmp_path, what, gradients, told):
    torch._dynamo.reset()
    with followed(tmp_path, compiling=True) as (session, _):
        model, averaged, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if what == "module":
            averaged.compile(backend="eager")
        function = torch.compile(lambda x: averaged(x), backend="eager")
        given = torch.compile(lambda module, x: module(x), backend="eager")
        call = {"module": averaged, "function": function, "given": functools.partial(given, averaged)}[what]
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.set_grad_enabled(gradients):
                y = call(x).detach()
            with torch.no_grad():
                nn.functional.mse_loss(y, x)
    (note,) = session.steps.evals.notes
    assert note.startswith(told)
    assert not session.hearing.notes


def of_model_and(before, model):
    def given(x, module, times=1.0):
        return times * module(x)

    def beside_another(x):
        return model(before(x))

    by_name, partly = functools.partial(given, module=model), functools.partial(given, module=before, times=2.0)
    given, by_name, partly, beside_another = (
        torch.compile(function, backend="eager") for function in (given, by_name, partly, beside_another)
    )
    return {
        "by name": lambda x: given(x, module=model),
        "by name before": lambda x: by_name(x, times=3.0),
        "another by name before": lambda x: partly(x, module=model),
        "beside another": beside_another,
    }


@pytest.mark.parametrize("what", ["by name", "by name before", "another by name before", "beside another"])
def test_a_model_that_a_compiled_function_has_by_name_or_beside_another_is_called(tmp_path, what):
    torch._dynamo.reset()
    with followed(tmp_path, compiling=True) as (session, writer):
        model, x = nn.Linear(8, 8), torch.ones(4, 8)
        optimizer, call = torch.optim.SGD(model.parameters(), lr=0.1), model
        for _ in range(3):
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            call = of_model_and(nn.Linear(8, 8), model)[what]
    assert writer.column("tokens") == dict.fromkeys(range(1, 4), 4.0)
    assert session.facts()["models"] == 1
    assert not session.hearing.notes


@pytest.mark.parametrize("alone", [(), (1,), (0.1,), ("l2",), (None,)])
def test_a_compiled_function_that_is_given_a_model_and_no_data_evaluates_nothing(tmp_path, alone):
    torch._dynamo.reset()
    with followed(tmp_path, compiling=True) as (session, writer):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        penalty = torch.compile(lambda module, *rest: module.weight.square().sum(), backend="eager")
        for _ in range(2):
            (model(torch.ones(4, 8)).square().mean() + 0.1 * penalty(model, *alone)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                penalty(model, *alone)
    assert not writer.column("eval_loss")
    assert not session.hearing.notes


def test_a_compiled_loss_that_is_given_what_holds_a_model_is_no_call_of_it(tmp_path):
    torch._dynamo.reset()

    def penalized(held, y, target):
        return (y - target).square().mean() + held.model.weight.square().sum()

    with followed(tmp_path, compiling=True) as (session, writer):
        trainer, x = Trainer(nn.Linear(8, 8)), torch.ones(4, 8)
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        loss = torch.compile(penalized, backend="eager")
        for _ in range(2):
            loss(trainer, trainer.model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert writer.column("tokens") == {1: 4.0, 2: 4.0}
    assert not session.hearing.notes
