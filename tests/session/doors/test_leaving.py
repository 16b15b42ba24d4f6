"""What leaves a watched model has nothing of ours in it: copies, files, scripts, traces."""

import copy
import io
import multiprocessing.reduction
import pickle

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.export import export
from torch.nn import functional as F

from narrowgauge.compute.nn import Fp8Linear, scaling_state

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


class WithALoss(Net):
    def forward(self, x):
        return F.mse_loss(self.b(F.relu(self.a(x))), x)


class SaysWhatIsKept(Net):
    def __getstate__(self):
        return {**self.__dict__, "saved": True}


class Kept:
    """What a class may have behind nn.Module."""

    def __reduce_ex__(self, protocol):
        return _rebuilt, (self.state_dict(), self.a)


class PickledInItsOwnWay(Net, Kept):
    pass


def _rebuilt(state, first):
    model = PickledInItsOwnWay()
    model.load_state_dict(state)
    model.rebuilt = first
    return model


def nothing(module, args):
    """A hook of the program's own."""


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def to_a_process(model):
    return pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(model))


COPIED = {
    "deepcopy": copy.deepcopy,
    "torch.save": through_a_file,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "spawn": to_a_process,
}


def training(model, tmp_path, between, **plan):
    """Train three steps, the second recorded; between forward and backward of each, and after it, something else."""
    losses, found = [], []
    with followed(tmp_path, every=2, judge="current", compiling=True, **plan) as (session, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            out = model(X)
            loss = out if not out.dim() else (out - X).square().mean()
            found.append(between(model))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(between(model))
    return losses, found, session, writer


@pytest.mark.parametrize("how", COPIED)
@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("kind", [Net, SaysWhatIsKept])
def test_a_copy_has_the_programs_hooks_and_none_of_ours(tmp_path, how, recipe, kind):
    torch.manual_seed(0)
    model = kind()
    model.register_forward_pre_hook(nothing)
    _, copies, session, writer = training(model, tmp_path, COPIED[how], recipe=recipe)
    for twin in copies:
        assert hasattr(twin, "saved") is (kind is SaysWhatIsKept)
        assert list(twin._forward_pre_hooks.values()) == [nothing]
        assert sum(len(getattr(m, name)) for m in twin.modules() for name in HOOKS) == 1
    assert session.ledger.steps == 3
    assert not [note for note in session.facts()["notes"] if "failed" in note]
    assert {site for step, sites, _ in writer.tensors for site in sites if step == 2} >= {"a:input", "b:grad_output"}
    assert torch.equal(copies[-1](X), model(X))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", [Net, WithALoss])
@pytest.mark.parametrize("made", ["script", "trace"])
def test_a_scripted_or_traced_model_is_as_without_us(tmp_path, kind, made):
    def graph(model):
        made_of = torch.jit.script(model) if made == "script" else torch.jit.trace(model, (X,))
        with torch.no_grad():
            assert torch.equal(made_of(X), model(X))
        return sorted(node.kind() for node in made_of.inlined_graph.nodes())

    torch.manual_seed(0)
    model = kind()
    bare = graph(model)
    hooks = [dict(getattr(model, name)) for name in HOOKS]
    losses, graphs, session, writer = training(model, tmp_path, graph)
    assert graphs == [bare] * 4
    assert hooks == [{}] * 5
    assert sorted(writer.column("loss").values()) == sorted(losses)
    assert session.facts()["backwards"] == 3
    assert {site for step, sites, _ in writer.tensors for site in sites if step == 2} >= {"a:input", "b:grad_output"}


def graph_of(made):
    graph = made[0] if isinstance(made, tuple) else getattr(made, "inlined_graph", None) or made.graph
    if isinstance(graph, torch.Graph):
        return [node.kind() for node in graph.nodes()]
    return [f"{node.op} {node.target}" for node in graph.nodes]


def exported(model, **how):
    return torch.export.export(model, (X,), **how).module()


TRACED = {
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, X),
    "trace of forward": lambda model: torch.jit.trace(model.forward, X),
    "trace_module": lambda model: torch.jit.trace_module(mod=model, inputs={"forward": X}),
    "export": exported,
    "export, strict": lambda model: exported(model, strict=True),
    "export by a name taken before": lambda model: export(mod=model, args=(X,)).module(),
    "onnx": torch.no_grad()(lambda model: torch.jit._get_trace_graph(model, (X,))),  # as torch.onnx does
    "trace of a wrapper": lambda model: torch.jit.trace(nn.Sequential(model), X),
    "export of a wrapper": lambda model: exported(nn.Sequential(model)),
    "export of a wrapper, strict": lambda model: exported(nn.Sequential(model), strict=True),
    "fx": torch.fx.symbolic_trace,
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", TRACED)
def test_what_is_made_of_a_converted_model_is_plain_and_training_goes_on(tmp_path, how):
    def scales(model):
        return {name: scale.clone() for name, scale in scaling_state(model).items()}

    def made(model):
        traced, plain, own = TRACED[how](model), Net(), list(map(id, model.parameters()))
        assert graph_of(traced) == graph_of(TRACED[how](plain))
        plain.load_state_dict(model.state_dict())
        if how != "onnx":
            with torch.no_grad():
                assert torch.equal(traced(X), model(X)) is (how == "fx")  # which holds the model's own layers
                assert torch.equal(traced(X), plain(X)) is (how != "fx")
        assert list(map(id, model.parameters())) == own
        return scales(model)

    kept = []
    for between in (scales, made):
        torch.manual_seed(0)
        losses, states, _, writer = training(Net(), tmp_path, between, recipe="delayed")
        kept.append((losses, states, writer.column("loss"), [site for _, sites, _ in writer.tensors for site in sites]))
    torch.testing.assert_close(kept[0][:3], kept[1][:3], rtol=0, atol=0)
    assert kept[0][3] == kept[1][3]
    assert len(kept[1][0]) == 3
    assert len(kept[1][1][-1]) > 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_traced_function_calls_plain_layers_and_an_error_leaves_them_converted(tmp_path):
    def function(x):
        return model(x)

    def refused(x):
        raise ValueError

    with followed(tmp_path, recipe="current", compiling=True):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).square().mean().backward()
        optimizer.step()
        model.requires_grad_(False)
        torch.jit.trace(function, X)
        with pytest.raises(ValueError):
            torch.jit.trace(refused, X)
        assert isinstance(model.a, Fp8Linear)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_model_that_trains_is_told_as_such(tmp_path):
    with followed(tmp_path, every=1, judge="current", compiling=True) as (session, writer):
        model = torch.jit.script(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            (model(X) - X).square().mean().backward()
            optimizer.step()
    facts = session.facts()
    assert facts["not_found"] == ["No model was found: what is trained is TorchScript, whose modules take no hooks."]
    assert not session.hearing.notes
    assert [len(writer.column(name)) for name in ("loss", "grad_norm", "update_ratio")] == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_function_may_call_the_losses_that_are_heard(tmp_path):
    def loss(x: torch.Tensor, y: torch.Tensor):
        return F.smooth_l1_loss(x, y) + F.huber_loss(x, y) + F.mse_loss(x, y)

    with followed(tmp_path) as (session, _):
        scripted = torch.jit.script(loss)
        assert torch.equal(scripted(X, -X), loss(X, -X))
    assert session.notes == []


def test_pickling_is_as_it_was_found(tmp_path):
    with followed(tmp_path, judge="current", compiling=True):
        assert "__reduce_ex__" in vars(nn.Module)
    assert "__reduce_ex__" not in vars(nn.Module)


@pytest.mark.parametrize("how", COPIED)
def test_a_class_with_another_base_is_pickled_as_that_says(tmp_path, how):
    _, copies, _, _ = training(PickledInItsOwnWay(), tmp_path, COPIED[how])
    assert [sum(len(getattr(twin.rebuilt, name)) for name in HOOKS) for twin in copies] == [0, 0, 0, 0]
