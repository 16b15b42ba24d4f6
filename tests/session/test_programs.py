"""Programs that do not train as textbooks do: none is disturbed, and the run says what was and was not seen of it."""

import copy
import gc
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from tests.session.inline import followed, through_a_backward_thread
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from narrowgauge.observe.stats import host_ready
from narrowgauge.session.models import roots
from narrowgauge.session.recorder import Recorder

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def linear():
    torch.manual_seed(0)
    return nn.Linear(16, 16)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model, x=X):
    return (model(x) - x).square().mean()


# ------------------------------------------------------------------------------ several trainings in one process


def test_finished_trainings_are_not_kept_alive(tmp_path):
    kept = []
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        for _ in range(3):
            model = nn.Sequential(linear(), nn.Linear(16, 16))
            kept += [weakref.ref(m) for m in model.modules()] + [weakref.ref(p) for p in model.parameters()]
            optimizer = sgd(model)
            kept.append(weakref.ref(optimizer))
            for _ in range(2):
                loss_of(model).backward()
                optimizer.step()
            del model, optimizer
            gc.collect()
        assert not [k for k in kept if k() is not None]
        assert len(session.roots) == 0
    facts = session.facts()
    assert (facts["steps"], facts["models"], facts["parameters"], facts["device"]) == (6, 3, 3 * 2 * 272, "cpu")
    assert sorted(writer.scalars) == [1, 2, 3, 4, 5, 6]


def test_the_next_training_has_the_names_of_the_last(tmp_path):
    with followed(tmp_path, recipe="current", every=1) as (session, writer):
        for _ in range(2):
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            optimizer = sgd(model)
            model(torch.ones(16, 32)).sum().backward()
            optimizer.step()
            del model, optimizer
            gc.collect()
    assert [step for step, _, _ in writer.tensors if step] == [1, 1, 2, 2]
    assert {site for _, sites, _ in writer.tensors for site in sites if not site.startswith(("0:", "1:"))} == set()
    assert [row["name"] for row in session.facts()["conversion"]] == ["0", "1"]


def test_the_last_step_of_a_training_knows_its_own_copies_when_the_next_has_the_same_names(tmp_path, monkeypatch):
    wrapped = [0, None]  # the first model's weights are those of rank 0, the second's nobody else has
    monkeypatch.setattr(roots, "copied_by", lambda modules: wrapped.pop(0))
    found = []
    with followed(tmp_path, judge="current", every=1) as (session, _):
        copies = session.ranks._told.copies

        def offered(step, packed):
            sites = [site for each in packed for site in each.operands[0]]
            found.append((step, {site: copies(site) for site in sites if site.endswith(":weight")}))
            return True

        session.recorder.collector.outlet = offered
        for _ in range(2):
            model = nn.Sequential(linear(), linear())
            optimizer = sgd(model)
            for _ in range(2):
                loss_of(model).backward()
                optimizer.step()
            del model, optimizer
            gc.collect()
    first, second = {"0:weight": 0, "1:weight": 0}, {"0:weight": None, "1:weight": None}
    assert found == [(1, first), (2, first), (3, second), (4, second)]


# ------------------------------------------------------------------------------ what cannot be found is said


class Parts(nn.Module):
    """Is never called itself; what it calls is partly frozen."""

    def __init__(self):
        super().__init__()
        self.backbone, self.neck, self.head = linear(), nn.Sequential(linear(), nn.Tanh(), linear()), linear()
        self.backbone.requires_grad_(False)

    def loss(self, x):
        return (self.head(self.neck(self.backbone(x))) - x).square().mean()


@pytest.mark.parametrize("around", [lambda model: model, nn.DataParallel, lambda model: nn.ModuleDict({"net": model})])
def test_parts_of_a_partly_frozen_model_have_its_names(tmp_path, around):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = Parts()
        whole = around(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            model.loss(X).backward()
            optimizer.step()
            optimizer.zero_grad()
        prefix = "net." if isinstance(whole, nn.ModuleDict) else ""
    names = {f"{prefix}{name}" for name in ("head", "neck.0", "neck.2")}
    roles = ("input", "weight", "grad_output")
    for step, sites, _ in writer.tensors:
        assert set(sites) == {f"{name}:{role}" for name in names for role in roles}, step
    assert len(writer.tensors) == 3
    assert not session.hearing.notes


class OfFabric(nn.Module):
    """What Lightning's Fabric makes of a model: both, the wrapper of its strategy first."""

    def __init__(self, model, wrap):
        super().__init__()
        self._forward_module = wrap(model)
        self._original_module = model

    def forward(self, x):
        return self._forward_module(x)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
def test_layers_below_fabric_have_the_names_that_their_author_gave(tmp_path, wrap):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = OfFabric(nn.Sequential(linear(), nn.Tanh(), linear()), wrap)
        optimizer = sgd(model)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    for _, sites, _ in writer.tensors:
        assert {site.partition(":")[0] for site in sites} == {"0", "2"}
    assert len(writer.tensors) == 2
    assert not session.hearing.notes


def test_two_layers_that_happen_to_be_called_as_fabrics_are_both_recorded(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = OfFabric(linear(), lambda model: linear())
        model.forward = lambda x: model._original_module(model._forward_module(x))
        optimizer = sgd(model)
        loss_of(model).backward()
        optimizer.step()
    ((_, sites, _),) = writer.tensors
    assert {site.partition(":")[0] for site in sites} == {"_forward_module", "_original_module"}
    assert not session.hearing.notes


@pytest.mark.parametrize("name", ["module", "_original_module"])
def test_a_layer_beside_a_parameter_or_nothing_is_in_no_wrapper_of_a_librarys(tmp_path, name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            if name == "module":
                self.scale = nn.Parameter(torch.ones(()))
            else:
                self.register_module("_forward_module", None)
            self.add_module(name, linear())

        def forward(self, x):
            return self.get_submodule(name)(x) * getattr(self, "scale", 1)

    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = Model()
        optimizer = sgd(model)
        loss_of(model).backward()
        optimizer.step()
    ((_, sites, _),) = writer.tensors
    assert {site.partition(":")[0] for site in sites} == {name}
    assert not session.hearing.notes


def test_parts_of_two_models_have_names_of_their_own(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (_, writer):
        models = [Parts(), Parts(), nn.Sequential(linear())]
        optimizer = torch.optim.SGD([p for m in models for p in m.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            (models[0].loss(X) + models[1].loss(X) + loss_of(models[2])).backward()
            optimizer.step()
            optimizer.zero_grad()
    roles = ("input", "weight", "grad_output")
    own = {"neck.0", "neck.2", "head"} | {"Sequential1.0", "Sequential1.2", "Linear1", "Sequential2.0"}
    assert set(writer.tensors[-1][1]) == {f"{name}:{role}" for name in own for role in roles}


def test_a_loss_by_autograd_grad_is_told(tmp_path):
    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            grads = torch.autograd.grad(loss_of(model), list(model.parameters()))
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g
            optimizer.step()
    assert session.facts()["steps"] == 2
    assert len(writer.column("grad_norm")) == 2
    assert writer.column("loss") == {}
    [note] = session.facts()["not_found"]
    assert note.startswith("No loss was found: backward was never called")


def test_torch_func_is_followed_by_its_optimizer(tmp_path):
    with followed(tmp_path) as (session, _):
        model = linear()
        optimizer = sgd(model)
        for _ in range(3):
            named = {name: p.detach() for name, p in model.named_parameters()}
            grads = torch.func.grad(lambda named: loss_of(lambda x: torch.func.functional_call(model, named, x)))(named)
            for name, p in model.named_parameters():
                p.grad = grads[name]
            optimizer.step()
    facts = session.facts()
    assert facts["steps"] == 3
    assert [note.split(":")[0] for note in facts["not_found"]] == ["No model was found", "No loss was found"]
    assert session.hearing.notes == []


def test_a_conversion_that_met_no_model_is_told(tmp_path):
    with followed(tmp_path, recipe="current", compiling=True) as (session, _):
        model = linear()
        stacked = torch.nn.Parameter(model.weight.detach()[None].repeat(2, 1, 1))
        optimizer = torch.optim.SGD([stacked], lr=0.1)
        (X @ stacked[0].T).square().mean().backward()
        optimizer.step()
    [told] = session.facts()["not_found"]
    assert told.startswith("No model was found: ")
    assert told.endswith(" Nothing was converted.")


class Own:
    """An optimizer that derives from nothing."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            p -= 0.1 * p.grad


def test_an_optimizer_that_is_not_torch_s_is_told(tmp_path):
    with followed(tmp_path) as (session, _):
        model = linear()
        optimizer = Own(model.parameters())
        loss_of(model).backward()
        optimizer.step()
    assert session.facts()["not_found"] == [
        "No optimizer was found: none that derives from torch.optim.Optimizer was made. No step was seen."
    ]


class Derived(torch.optim.Optimizer):
    """An optimizer of the program's own that derives from torch's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


def test_an_optimizer_that_derives_from_torch_s_is_followed(tmp_path):
    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer = Derived(model.parameters())
        loss_of(model).backward()
        optimizer.step()
    assert session.facts()["not_found"] == []
    assert writer.column("lr") == {1: 0.5}


class Interrupted(nn.Module):
    """Its forward is left by Ctrl-C, once."""

    def __init__(self):
        super().__init__()
        self.layer, self.now = linear(), False

    def forward(self, x):
        if self.now:
            self.now = False
            raise KeyboardInterrupt
        return self.layer(x)


@pytest.mark.parametrize("another", [False, True])
def test_a_forward_that_is_interrupted_is_forgotten(tmp_path, another):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = Interrupted()
        optimizer = sgd(model)
        for step in range(4):
            model.now = step == 1
            try:
                loss_of(model).backward()
            except KeyboardInterrupt:
                if another:  # the next cell of a notebook makes all of it anew
                    model = Interrupted()
                    optimizer = sgd(model)
                continue
            optimizer.step()
    assert session.facts()["steps"] == 3
    assert list(writer.column("tokens").values()) == [8, 8, 8]
    for step in (1, 2, 3):
        seen = {site for at, sites, _ in writer.tensors for site in sites if at == step}
        assert {site.partition(":")[0] for site in seen} == {"layer"}, step
        assert len(seen) == 3
    assert session.hearing.notes == []


class BesideLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.free = nn.Linear(16, 16), nn.Parameter(torch.eye(16))

    def forward(self, x):
        return self.layer(x) @ self.free


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("evaluates", [False, True])
def test_what_was_multiplied_in_a_call_that_is_left_is_in_its_steps_rows_and_no_token(tmp_path, error, evaluates):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = BesideLayers()
        optimizer, stops = sgd(model), []

        def stop(*_):
            if stops:
                raise stops.pop()

        model.layer.register_forward_hook(stop)
        for step in range(3):
            if step == 1:
                stops.append(error())
                with pytest.raises(error):
                    model(X)
                if evaluates:
                    with torch.no_grad():
                        model(X)
            loss_of(model).backward()
            optimizer.step()
    assert list(writer.column("tokens").values()) == [8, 8, 8]
    rows = {step: dict(zip(sites, found["numel"], strict=True)) for step, sites, found in writer.tensors}
    assert [rows[step]["layer:input"] for step in (1, 2, 3)] == [128, 256, 128]
    assert [rows[step]["free:input"] for step in (1, 2, 3)] == [128, 128, 128]
    assert session.hearing.notes == []


class Stopping(torch.Tensor):
    """Ctrl-C comes while it is multiplied."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear or func is torch._C._nn.linear:
            raise KeyboardInterrupt
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_layer_that_is_left_in_its_forward_hides_no_product_of_what_follows(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (_, writer):
        model = BesideLayers()
        optimizer = sgd(model)
        for step in range(3):
            if step == 1:
                with pytest.raises(KeyboardInterrupt):
                    model(X.as_subclass(Stopping))
            loss_of(model).backward()
            optimizer.step()
    rows = {step: dict(zip(sites, found["numel"], strict=True)) for step, sites, found in writer.tensors}
    assert [rows[step].get("free:input") for step in (1, 2, 3)] == [128, 128, 128]


def test_a_model_whose_hooks_the_program_clears_keeps_its_tokens(tmp_path):
    with followed(tmp_path) as (_, writer):
        model = linear()
        optimizer = sgd(model)
        for step in range(4):
            if step == 1:
                model._forward_hooks.clear()
            loss_of(model).backward()
            optimizer.step()
    assert writer.column("tokens") == dict.fromkeys((1, 2, 3, 4), 8)


def test_a_model_that_calls_itself_is_not_taken_for_interrupted(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x, again=True):
            return self(self.layer(x), again=False) if again else self.layer(x)

    with followed(tmp_path, every=1, judge="current") as (_, writer):
        model = Twice()
        optimizer = sgd(model)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
    assert list(writer.column("tokens").values()) == [8, 8]


def test_a_program_that_never_steps_is_told(tmp_path):
    with followed(tmp_path) as (session, writer):
        model = linear()
        sgd(model)
        loss_of(model).backward()
    assert session.facts()["not_found"] == ["No step was seen: no torch.optim optimizer stepped."]
    assert writer.scalars == {}


def test_parameters_without_a_module_are_told(tmp_path):
    with followed(tmp_path) as (session, writer):
        w = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([w], lr=0.1)
        (w * w).sum().backward()
        optimizer.step()
    assert [note.split(":")[0] for note in session.facts()["not_found"]] == ["No model was found"]
    assert writer.column("loss") == {1: 4.0}


def test_a_forward_that_is_called_by_its_name_is_told(tmp_path):
    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer = sgd(model)
        model.forward(X).square().mean().backward()
        optimizer.step()
    [told] = session.facts()["not_found"]
    assert told.endswith("(a forward(...) that is called by name, or under a transform of torch.func, is not heard).")
    assert not writer.column("tokens")


# ------------------------------------------------------------------------------ patched functions


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_program_that_patches_backward_keeps_its_patch(tmp_path, monkeypatch, when):
    calls = []
    originals = torch.Tensor.backward, torch.autograd.backward
    for owner, original in zip((torch.Tensor, torch.autograd), originals, strict=True):  # at the end they are again
        monkeypatch.setattr(owner, "backward", original)

    def patch():
        def method(self, *args, **kwargs):
            calls.append("method")
            return originals[0](self, *args, **kwargs)

        current = torch.autograd.backward

        def function(*args, **kwargs):
            calls.append("function")
            return current(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "backward", method)
        monkeypatch.setattr(torch.autograd, "backward", function)
        return function

    theirs = patch() if when == "before" else None
    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer = sgd(model)
        theirs = theirs or patch()
        wanted = loss_of(model)
        wanted.backward()
        optimizer.step()
    assert calls == ["method", "function"]
    assert writer.column("loss") == pytest.approx({1: float(wanted.detach())})
    assert torch.autograd.backward is theirs
    loss_of(model).backward()  # what of ours is still inside of theirs tells nobody
    assert calls == ["method", "function"] * 2
    assert session.updates.backwards == 1


# ------------------------------------------------------------------------------ losses and steps of other shapes


def test_several_backward_calls_and_kept_graphs_are_one_step(tmp_path):
    with followed(tmp_path) as (_, writer):
        model = linear()
        optimizer = sgd(model)
        first, second = (y := model(X)).square().mean(), y.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
    assert writer.column("loss") == pytest.approx({1: float(first.detach() + second.detach())})
    assert writer.column("microbatches") == {1: 2}


def test_the_two_optimizers_of_a_gan_make_steps_of_their_own(tmp_path):
    with followed(tmp_path) as (session, writer):
        generator, critic = linear(), nn.Linear(16, 1)
        first, second = sgd(generator, 0.1), sgd(critic, 0.2)
        for _ in range(2):
            critic(generator(X).detach()).mean().backward()
            second.step()
            (-critic(generator(X))).mean().backward()
            first.step()
    assert session.facts()["steps"] == 4
    assert list(writer.column("lr").values()) == [0.2, 0.1, 0.2, 0.1]


def test_a_generator_is_recorded_whoever_s_turn_the_cadence_meets(tmp_path):
    with followed(tmp_path, every=10, judge="current") as (_, writer):
        critic, generator = nn.Linear(16, 1), linear()
        first, second = sgd(critic, 0.2), sgd(generator, 0.1)
        seen = {}
        for step in range(1, 24, 2):
            fake = generator(X)  # called in the critic's turn, its gradient is in its own
            critic(fake.detach()).mean().backward()
            first.step()
            fake.register_hook(lambda dy, step=step: seen.update({step: dy.abs().max().item()}))
            (-critic(fake)).mean().backward()
            second.step()
    rows = {(step, site): columns["amax"][n] for step, sites, columns in writer.tensors for n, site in enumerate(sites)}
    both = {f"Linear1:{role}" for role in ("input", "weight", "grad_output")}  # the critic is called in every turn
    called, learns = {"(model):input", "(model):weight"} | both, {"(model):grad_output"} | both
    assert set(rows) == {
        (first + n, site) for first in (10, 20) for n, sites in enumerate((both, called, learns)) for site in sites
    }
    assert [rows[n, "(model):grad_output"] for n in (12, 22)] == pytest.approx([seen[11], seen[21]], rel=1e-6)
    assert rows[11, "(model):input"] == pytest.approx(X.abs().max().item())


def test_what_an_optimizer_tries_with_its_closure_is_one_step(tmp_path):
    with followed(tmp_path, every=1) as (session, writer):
        model = linear()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
        evaluations, wanted = [], []
        for _ in range(3):

            def closure():
                optimizer.zero_grad()
                loss = loss_of(model)
                loss.backward()
                evaluations.append((float(loss.detach()), [p.grad.clone() for p in model.parameters()]))
                return loss

            first = len(evaluations)
            optimizer.step(closure)
            wanted.append(evaluations[first])
    assert session.facts()["steps"] == 3
    assert len(evaluations) > 6
    assert list(writer.column("loss").values()) == pytest.approx([loss for loss, _ in wanted])
    norms = [torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])).item() for _, grads in wanted]
    assert list(writer.column("grad_norm").values()) == pytest.approx(norms)
    assert set(writer.column("lr").values()) == {0.5}
    assert all(ratio > 0 for ratio in writer.column("update_ratio").values())
    assert set(writer.column("tokens").values()) == {len(X)}
    assert session.hearing.notes == []


def test_two_optimizers_with_closures_that_only_they_need_make_one_step(tmp_path):
    """So does Lightning's manual optimization, whose every step has one that does nothing."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 2)
    model = nn.Sequential(first, second)
    optimizers = [torch.optim.SGD(of.parameters(), lr=0.1) for of in (first, second)]
    norms = []
    with followed(tmp_path, every=2) as (session, writer):
        for optimizer in optimizers:
            session.optimizer_made(optimizer)
        for _ in range(4):
            model(torch.randn(4, 8)).square().mean().backward()
            norms.append(sum(p.grad.double().square().sum().item() for p in model.parameters()) ** 0.5)
            for optimizer in optimizers:
                optimizer.step(lambda: None)
            model.zero_grad()
    assert list(writer.column("microbatches").values()) == [1, 1, 1, 1]
    assert list(writer.column("grad_norm").values()) == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("plan", [{"judge": "current"}, {"recipe": "current"}])
def test_tensors_are_those_of_the_closure_s_first_call(tmp_path, plan):
    with followed(tmp_path, every=1, **plan) as (_, writer):
        model = nn.Sequential(linear())
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        first, calls = [], []

        def closure():
            optimizer.zero_grad()
            x = X * (1.0 + len(calls))  # each call has another input
            y = model(x)
            calls.append(x.abs().max().item())
            loss = (y - x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            first.append(len(calls))
            optimizer.step(closure)
    assert len(calls) > 6
    found = {}
    for step, sites, columns in writer.tensors:
        for n, site in enumerate(sites):
            if site.rpartition(":")[2] in ("input", "weight", "grad_output"):
                found.setdefault(site, {})[step] = (float(columns["numel"][n]), float(columns["amax"][n]))
    assert len(found) == 3
    assert {numel for rows in found.values() for numel, _ in rows.values()} == {X.numel(), 256.0}
    [inputs] = [rows for site, rows in found.items() if site.endswith("input")]
    assert [amax for _, amax in inputs.values()] == pytest.approx([calls[n] for n in first], rel=1e-6)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_called_as_it_was_given(tmp_path, by_name):
    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer = sgd(model)

        def closure():
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(2):
            out = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert writer.column("loss")[2] == pytest.approx(float(out.detach()))
    assert (session.facts()["steps"], writer.column("microbatches")) == (2, {1: 1, 2: 1})


def test_an_optimizer_per_parameter_stepped_in_backward_makes_one_step_of_each(tmp_path):
    with followed(tmp_path, every=2) as (session, writer):
        model = nn.Sequential(linear(), nn.ReLU(), nn.Linear(16, 16))
        made = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        gradients = {}

        def step(p):
            gradients[p] = p.grad.detach().clone()
            made[p].step()
            made[p].zero_grad()

        for p in made:
            p.register_post_accumulate_grad_hook(step)
        for _ in range(4):
            before = torch.cat([p.detach().flatten().clone() for p in made])
            loss_of(model).backward()
    assert session.facts()["steps"] == 4
    assert list(writer.column("grad_norm")) == [2, 4]  # of thousands of optimizers, only where it is recorded
    want = torch.cat([gradients[p].flatten() for p in made])
    assert writer.column("grad_norm")[4] == pytest.approx(float(want.norm()), rel=1e-6)
    assert writer.column("update_ratio")[4] == pytest.approx(0.1 * float(want.norm() / before.norm()), rel=1e-5)
    assert writer.column("microbatches") == {1: 1, 2: 1, 3: 1, 4: 1}
    assert session.hearing.notes == []


def test_what_steps_in_a_thread_of_the_backward_pass_is_followed(tmp_path):
    with followed(tmp_path, every=2) as (session, writer):
        model = linear()
        optimizer = sgd(model)
        threads, gradients = set(), []

        def step():
            threads.add(threading.get_ident())
            gradients.append(model.weight.grad.detach().clone())
            optimizer.step()
            optimizer.zero_grad()

        def learn():  # a recomputed forward, its backward, and the step of it
            model(X).square().mean().backward()
            step()

        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(3):
            through_a_backward_thread(torch.ones((), requires_grad=True), learn).backward()
    assert threading.get_ident() not in threads
    assert session.facts()["steps"] == 4
    assert writer.column("microbatches") == {1: 1, 2: 1, 3: 1, 4: 1}
    assert list(writer.column("lr")) == [1, 2, 3, 4]
    assert session.hearing.notes == []


def test_what_runs_in_a_thread_of_somebody_s_gradients_is_no_training_of_its_own(tmp_path):
    with followed(tmp_path) as (session, _):
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            x = torch.ones((), requires_grad=True)
            torch.autograd.grad(through_a_backward_thread(x, lambda: model(X)), x)
    assert session.facts()["steps"] == 2
    assert session.hearing.notes == []


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_around_another_makes_one_step_with_it(tmp_path):
    with followed(tmp_path, every=1) as (session, writer):
        model = linear()
        optimizer = Wrapping(sgd(model))
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert session.facts()["steps"] == 3
    assert len(writer.column("update_ratio")) == 3
    assert session.hearing.notes == []


# ------------------------------------------------------------------------------ errors that a program catches


class Failing(nn.Module):
    """Fails where it is told to."""

    def __init__(self):
        super().__init__()
        self.layer, self.where = linear(), ""

    def forward(self, x):
        if self.where == "forward":
            raise RuntimeError("out of memory")
        y = self.layer(x)
        if self.where == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, _):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("early", [True, False])
def test_a_microbatch_that_fails_and_is_tried_again_counts_once(tmp_path, where, early):
    with followed(tmp_path) as (session, writer):
        model = Failing()
        optimizer = sgd(model)
        for step in range(3):
            model.where = where if (step == 0) == early else ""
            if model.where:
                with pytest.raises(RuntimeError, match="out of memory"):
                    loss_of(model).backward()
                model.where = ""
            wanted = loss_of(model)
            wanted.backward()
            optimizer.step()
    assert session.facts()["steps"] == 3
    assert writer.column("microbatches") == {1: 1, 2: 1, 3: 1}
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}
    assert writer.column("loss")[3] == pytest.approx(float(wanted.detach()))
    assert not session.calls.running


def test_a_model_that_returns_nothing_has_its_tokens_even_while_an_error_is_handled(tmp_path):
    class Keeps(nn.Linear):
        def forward(self, x):
            self.loss = super().forward(x).square().mean()

    with followed(tmp_path) as (_, writer):
        model = Keeps(16, 16)
        optimizer = sgd(model)
        for _ in range(2):
            try:
                raise ValueError("of the program's own")
            except ValueError:
                model(X)
                model.loss.backward()
                optimizer.step()
    assert writer.column("tokens") == {1: 8, 2: 8}


@pytest.mark.parametrize("clips", [False, True])
def test_an_optimizer_that_steps_as_its_base_class_does_steps_once(tmp_path, clips):
    class Within(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            return super().step(closure)

    norms, weights = [], []
    with followed(tmp_path, every=1) as (session, writer):
        model = linear()
        sgd(model)  # torch hooks the base class's step, too, once there is one
        optimizer = Within(model.parameters(), lr=0.1)
        for _ in range(3):
            loss_of(model).backward()
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item())
            optimizer.step()
            optimizer.zero_grad()
    assert session.facts()["steps"] == session.updates.ended == 3
    assert list(writer.column("grad_norm").values()) == pytest.approx(norms)
    assert list(writer.column("param_norm").values()) == pytest.approx(weights)


def test_a_step_that_fails_leaves_the_next_to_be_seen(tmp_path):
    class Once(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("not now")
            return super().step(closure)

    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer, other = Once(model.parameters(), lr=0.1), sgd(model)
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match="not now"):
            optimizer.step()
        for _ in range(2):
            loss_of(model).backward()
            other.step()
    assert session.facts()["steps"] == 2
    assert writer.column("microbatches") == {1: 2, 2: 1}


@pytest.mark.parametrize("both", [True, False])
def test_what_fails_of_ours_is_told_and_does_not_reach_the_program(tmp_path, monkeypatch, caplog, both):
    with followed(tmp_path, judge="current", every=1) as (session, writer):
        monkeypatch.setattr(Recorder, "product", lambda *_, **__: 1 / 0)
        if both:
            monkeypatch.setattr(session.steps.batches, "see", lambda *_, **__: 1 / 0)
        model = linear()
        optimizer = sgd(model)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
    assert session.facts()["steps"] == 3
    notes = [note for note in session.facts()["notes"] if "failed" in note]
    words = ["Following the program failed in begins: ZeroDivisionError: division by zero (3 times)", "Watching "]
    assert [note[: len(said)] for note, said in zip(notes, words[not both :], strict=True)] == words[not both :]
    # One warning and one event, as it happens, of whatever comes first.
    ((step, kind, what, *_),) = writer.events
    first = "following the program failed in begins" if both else "watching (model):input failed"
    assert (step, kind, what) == (1, "watch_failed", f"{first}: ZeroDivisionError: division by zero")
    assert [record.getMessage() for record in caplog.records] == [
        f"narrowgauge: {what}. Training goes on; the run's notes say what is missing."
    ]


# ------------------------------------------------------------------------------ threads


def test_of_two_threads_that_train_the_first_is_followed_and_the_other_told(tmp_path):
    with followed(tmp_path) as (session, writer):
        model, other = linear(), linear()
        optimizer, others = sgd(model), sgd(other, 0.7)

        def train():
            for _ in range(5):
                loss_of(other).backward()
                others.step()

        for _ in range(2):
            y = model(X)  # the other trains in the middle of our step
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
            y.square().mean().backward()
            optimizer.step()
    assert session.facts()["steps"] == 2
    assert set(writer.column("lr").values()) == {0.1}
    assert session.hearing.notes == ["Several threads of the program train; only the first is followed."]


def test_another_thread_is_told_while_the_first_is_in_its_backward_pass(tmp_path):
    with followed(tmp_path) as (session, writer):
        model, other = linear(), linear()
        optimizer, others = sgd(model), sgd(other, 0.7)

        def train():
            loss_of(other).backward()
            others.step()

        def meanwhile(gradient):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

        y = model(X)
        y.register_hook(meanwhile)
        y.square().mean().backward()
        optimizer.step()
    assert session.facts()["steps"] == 1
    assert set(writer.column("lr").values()) == {0.1}
    assert session.hearing.notes == ["Several threads of the program train; only the first is followed."]


def test_losses_of_another_thread_are_no_evaluation_of_this_one(tmp_path):
    with followed(tmp_path) as (session, writer):
        model = linear()
        optimizer = sgd(model)

        def validate():
            with torch.no_grad():
                nn.functional.mse_loss(X, X + 3)

        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            thread = threading.Thread(target=validate)
            thread.start()
            thread.join()
            with torch.no_grad():
                nn.functional.mse_loss(X, X + 1 + 0 * model(X).sum())
    assert list(writer.column("eval_loss").values()) == pytest.approx([1.0, 1.0], rel=1e-6)
    assert session.facts()["steps"] == 2


def test_a_thread_that_trains_when_the_first_has_ended_is_followed(tmp_path):
    with followed(tmp_path) as (session, _):

        def train():
            model = linear()
            optimizer = sgd(model)
            loss_of(model).backward()
            optimizer.step()

        for _ in range(3):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
    assert session.facts()["steps"] == 3
    assert session.hearing.notes == []


# ------------------------------------------------------------------------------ gradient scalers


class Fused(Derived):
    """Decides as it steps whether it skips, as torch's fused optimizers do."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self):
        if float(self.found_inf) == 0.0:
            for p in self.param_groups[0]["params"]:
                p -= 0.1 * p.grad / self.grad_scale


def test_a_fused_optimizer_s_norm_is_unscaled_and_its_skip_is_seen(tmp_path):
    wanted = {}
    with followed(tmp_path) as (_, writer):
        model = linear()
        optimizer = Fused(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(1, 4):
            loss = loss_of(model) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            wanted[step] = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item() / scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert writer.column("skipped") == {2: 1.0}
    assert {s: writer.column("grad_norm")[s] for s in (1, 3)} == pytest.approx({s: wanted[s] for s in (1, 3)}, rel=1e-5)


# ------------------------------------------------------------------------------ tensors that are none


def under_vmap(model):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    of_one = lambda x: nn.functional.mse_loss(torch.func.functional_call(model, weights, (x,)), x)  # noqa: E731
    torch.func.vmap(of_one)(X)


def under_grad(model):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda w: nn.functional.mse_loss(torch.func.functional_call(model, w, (X,)), X))(weights)


def on_meta(model):
    nn.functional.mse_loss(torch.ones(3, device="meta"), torch.ones(3, device="meta"))


def faked(model):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        nn.functional.mse_loss(model(torch.ones(3, 16)), torch.ones(3, 16))


@pytest.mark.parametrize("evaluate", [under_vmap, under_grad, on_meta, faked])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_tensors_without_numbers_are_not_looked_at(mode, evaluate, tmp_path):
    if mode is torch.inference_mode and evaluate is faked:
        pytest.skip("torch traces no model in it")
    model = nn.Sequential(linear(), nn.Linear(16, 16))
    optimizer = sgd(model)
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        session.optimizer_made(optimizer)
        for _ in range(4):
            loss_of(model).backward()
            optimizer.step()
            with mode():
                evaluate(model)
    assert sorted(writer.column("loss")) == [1, 2, 3, 4]
    assert [step for step, _, _ in writer.tensors] == [1, 2, 3, 4]
    assert not session.hearing.notes
    assert not writer.column("eval_loss")
    assert session.recorder.collector.failures == 0


def traced(model):
    with torch.enable_grad():
        make_fx(lambda x: loss_of(model, x))(torch.ones(3, 16))


def test_what_make_fx_traces_is_no_training(tmp_path):
    model = nn.Sequential(linear(), nn.Linear(16, 16))
    optimizer = sgd(model)
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        session.optimizer_made(optimizer)
        for _ in range(3):
            traced(model)
            loss_of(model).backward()
            optimizer.step()
            with torch.no_grad():
                traced(model)
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}
    assert set(writer.column("microbatches").values()) == {1}
    assert {float(row["numel"][sites.index("0:input")]) for _, sites, row in writer.tensors} == {8.0 * 16}
    assert not writer.column("eval_loss")


class InTurn(nn.Module):
    """Gives one output after the other."""

    def __init__(self, by_name):
        super().__init__()
        self.words, self.head, self.by_name = nn.Embedding(8, 16), linear(), by_name

    def forward(self, ids):
        for row in ids:
            x = self.words(input=row) if self.by_name else self.words(row)
            yield self.head(x)


@pytest.mark.parametrize("by_name", [False, True])
def test_tokens_of_a_model_that_is_a_generator_count_once(tmp_path, by_name):
    model = InTurn(by_name)
    optimizer = sgd(model)
    ids = torch.arange(24).reshape(4, 6) % 8
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        session.optimizer_made(optimizer)
        for _ in range(3):
            for output in model(ids):
                output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.words(ids[0]).square().mean().backward()  # a part of it, called by itself
        optimizer.step()
    assert writer.column("tokens") == {1: 24, 2: 24, 3: 24, 4: 6}
    assert writer.column("microbatches") == {1: 4, 2: 4, 3: 4, 4: 1}
    assert not session.hearing.notes


def test_a_default_device_is_for_the_program(tmp_path):
    model = linear()
    optimizer = sgd(model)
    with followed(tmp_path, every=1, judge="current") as (session, writer), torch.device("meta"):
        session.optimizer_made(optimizer)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
        session.finish()
    assert all(np.isfinite(writer.column(name)[3]) for name in ("loss", "grad_norm", "param_norm", "update_ratio"))
    assert [step for step, _, _ in writer.tensors] == [1, 2, 3]
    assert not session.hearing.notes


def on_meta_like(model):
    return copy.deepcopy(model).to("meta")


def trained_on_meta(model):
    """One step, to see what memory it takes."""
    estimated = on_meta_like(model)
    optimizer = torch.optim.AdamW(estimated.parameters())
    estimated(torch.empty(8, 16, device="meta")).square().mean().backward()
    nn.utils.clip_grad_norm_(estimated.parameters(), 1.0)
    optimizer.step()


def called_with_meta_weights(model):
    weights = {name: p.requires_grad_() for name, p in on_meta_like(model).named_parameters()}
    torch.func.functional_call(model, weights, (torch.empty(8, 16, device="meta"),)).square().mean().backward()


@pytest.mark.parametrize("estimate", [trained_on_meta, called_with_meta_weights])
def test_what_is_done_on_meta_is_no_training(tmp_path, estimate):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = nn.Sequential(linear(), nn.Linear(16, 16))
        estimate(model)
        optimizer = sgd(model)
        for _ in range(3):
            estimate(model)
            loss = loss_of(model)
            estimate(model)
            loss.backward()
            estimate(model)
            optimizer.step()
            optimizer.zero_grad()
            estimate(model)
    assert writer.column("tokens") == {1: 8, 2: 8, 3: 8}
    assert set(writer.column("microbatches").values()) == {1}
    assert all(np.isfinite(writer.column(name)[3]) for name in ("loss", "grad_norm", "param_norm", "update_ratio"))
    operands = {f"{n}:{role}" for n in (0, 1) for role in ("input", "weight", "grad_output")}
    assert [(step, set(sites)) for step, sites, _ in writer.tensors] == [(step, operands) for step in (1, 2, 3)]
    assert [note for note in session.facts()["notes"] if "slower passes" not in note] == []


def test_a_model_that_leaves_meta_is_trained_from_then_on(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        model = nn.Sequential(nn.Linear(16, 16, device="meta"))
        estimated = torch.optim.AdamW(model.parameters())
        model(torch.empty(8, 16, device="meta")).square().mean().backward()
        estimated.step()
        model.to_empty(device="cpu")
        nn.init.normal_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        optimizer = sgd(model)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
    facts = session.facts()
    assert (facts["steps"], facts["models"], facts["baseline_dtype"]) == (2, 1, "float32")
    assert [set(sites) for _, sites, _ in writer.tensors] == [{"0:input", "0:weight", "0:grad_output"}] * 2


def test_a_program_that_only_estimates_has_made_no_step(tmp_path):
    with followed(tmp_path, every=1, judge="current") as (session, _):
        trained_on_meta(nn.Sequential(linear()))
    told = "No step was seen: no torch.optim optimizer stepped."
    assert session.facts()["not_found"] == [f"{told} One was made on the meta device, where nothing is trained."]
    assert session.hearing.notes == []


def test_why_tensors_are_counted_slowly_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(host_ready, "WALK", host_ready.Walk())
    monkeypatch.setattr(host_ready, "kernel", host_ready.kernel.__wrapped__)
    monkeypatch.setitem(sys.modules, "numba", None)
    model = linear()
    optimizer = sgd(model)
    with followed(tmp_path, every=1, judge="current") as (session, writer):
        session.optimizer_made(optimizer)
        loss_of(model).backward()
        optimizer.step()
    assert [step for step, _, _ in writer.tensors] == [1]
    (told,) = [note for note in session.facts()["notes"] if "fast walk" in note]
    assert "import of numba halted" in told
    assert told.endswith("slower passes take its place.")
