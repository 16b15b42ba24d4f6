"""What leaves a watched model has nothing of ours in it: copies, files, scripts, traces."""

import copy
import io
import multiprocessing.reduction
import pickle

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.nn import functional as F

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
