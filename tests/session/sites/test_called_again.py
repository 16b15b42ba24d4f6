"""A call as one before takes the shorter way, and leaves what the whole way does; what is not as simple goes that."""

import copy
import gc
import weakref

import pytest
import torch
from tests.session.sites.recorded import Rows
from tests.session.sites.test_transformer_engine import Linear as OfTransformerEngine
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from narrowgauge.observe.stats import Collector, host
from narrowgauge.session.sites import layer_calls
from narrowgauge.session.sites.layer_calls import LayerCalls
from narrowgauge.session.sites.plain_sites import PlainSites
from narrowgauge.session.sites.torchao import TorchAO
from narrowgauge.session.sites.transformer_engine import TransformerEngine


class Watch:
    """Recorded steps of a model, two usual ones first."""

    def __init__(self, model, x, **options):
        host.wait()
        self.writer, self.mine = Rows(), True
        self.collector = Collector(self.writer, every=1)
        self.sites = PlainSites("current", eager=True, training=lambda: True, mine=lambda: self.mine, **options)
        self.sites.add(model, self.collector)
        self.number = 0
        for _ in range(2):
            self.step(lambda: model(x).float().square().mean().backward())

    def step(self, run, begun=lambda: None):
        self.number += 1
        self.writer.rows.clear()
        self.collector.begin_step(self.number)
        self.sites.begin()
        begun()
        try:
            run()
        finally:
            self.sites.end()
            self.collector.flush()
        return {site: repr(row) for site, row in self.writer.rows.items()}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def twice(model, x):
    for _ in range(2):
        model(x).square().mean().backward()


def without_gradients(model, x):
    with torch.no_grad():
        model(x)


def recomputed(model, x):
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=False).square().mean().backward()


def reentrant(model, x):
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).square().mean().backward()


def smaller(model, x):
    model(x[:3]).square().mean().backward()


def by_keyword(model, x):
    model[2](input=model[1](model[0](input=x))).square().mean().backward()


def another_weight(model, x):
    model[0].weight = nn.Parameter(torch.randn(48, 32))
    model(x).square().mean().backward()


def changed_in_place(model, x):
    model[2](model[1](model[0](x).mul_(2))).square().mean().backward()


RUNS = (twice, without_gradients, recomputed, reentrant, smaller, by_keyword, another_weight, changed_in_place)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_rows_are_the_same_by_either_way(run, monkeypatch):
    def found():
        model = net()
        x = torch.randn(5, 16, 32)
        watch = Watch(model, x)
        rows = watch.step(lambda: run(model, x))
        return rows, watch.sites.notes, {key[1:] for key in watch.sites.shown.heard}

    short = found()
    monkeypatch.setattr(LayerCalls, "_called_again", lambda *args: False)
    assert short == found()
    assert "0:input" in short[0]


def test_a_call_as_before_is_not_taken_apart(monkeypatch):
    model, x = net(), torch.randn(4, 32)
    watch, calls = Watch(model, x), []
    called = LayerCalls.called
    monkeypatch.setattr(LayerCalls, "called", lambda *args: calls.append(args[1].name) or called(*args))
    rows = watch.step(lambda: model(x).square().mean().backward())
    assert not calls
    assert len(rows) == 6


def test_a_mode_of_the_program_sees_nothing_of_it():
    model, x = net(), torch.randn(4, 32)

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    watch = Watch(model, x)
    for mode in (Functions, Operations):
        told = []
        for step in (lambda run: run(), watch.step):
            seen = []

            def run(mode=mode):
                with mode():
                    model(x[:3])

            step(run)
            told.append(seen)
        assert len(told[0]) == len(told[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tensors_that_stand_for_others_are_not_looked_at():
    model, x = net(), torch.randn(4, 32)
    watch = Watch(model, x)
    assert not watch.step(lambda: torch.func.vmap(model)(x))
    assert not watch.step(lambda: torch.jit.trace(model, x, check_trace=False))
    assert not watch.sites.notes


def test_what_is_not_of_the_training_or_has_no_numbers_is_not_looked_at():
    model, x = net(), torch.randn(4, 32)
    watch = Watch(model, x)
    watch.mine = False
    assert not watch.step(lambda: model(x).square().mean().backward())
    watch.mine = True
    model.to("meta")
    assert not watch.step(lambda: model(x.to("meta")))
    assert not watch.sites.shown.heard
    assert not watch.sites.notes


def test_a_copy_that_multiplies_by_a_parameter_of_another_is_told_of_that():
    model, x = net(), torch.randn(4, 32)
    model.spare = nn.Module()
    model.spare.weight = nn.Parameter(torch.randn(48, 32))
    plain = nn.Sequential(*model[:3])
    model.forward = plain.forward
    watch = Watch(model, x)
    assert "Module" in " ".join(watch.sites.notes)

    def run():
        twin = copy.copy(model[0])
        twin._parameters = {**model[0]._parameters, "weight": model.spare.weight}
        twin(x)

    watch.step(run)
    assert not watch.sites.notes


def test_a_weight_that_was_gathered_from_a_mesh_is_told_of(two_ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    model, x = net(), torch.randn(4, 32)
    watch, whole = Watch(model, x), model[0].weight
    spread = DTensor.from_local(whole.detach(), init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
    model[0]._parameters["weight"] = nn.Parameter(spread)
    watch.step(lambda: model(x), begun=lambda: model[0]._parameters.update(weight=whole))
    assert "0:weight" in watch.sites.shown.meshes


def test_a_step_that_runs_uncompiled_is_told_what_no_graph_sees():
    x = torch.randn(4, 32)
    for layer in (OfTransformerEngine(), nn.Linear(32, 24)):
        model = nn.Sequential(layer)
        watch = Watch(model, x)

        def uncompiled(watch=watch):
            watch.sites.choice.uncompiled = True

        if type(layer) is nn.Linear:
            watch.step(lambda model=model: model(x), uncompiled)
            assert not watch.sites.choice.refused
            layer._parameters["weight"] = layer.weight.detach().requires_grad_()
        watch.step(lambda model=model: model(x), uncompiled)
        assert type(layer).__name__ in watch.sites.choice.refused


def test_a_transformer_engine_layer_may_be_another_in_each_step():
    def high(layer):
        layer.fp8 = False

    def cast(layer):
        layer.activation_dtype = torch.bfloat16

    for change in (lambda layer: None, high, cast):
        found = []
        for way in ("short", "whole"):
            torch.manual_seed(0)
            layer, x = OfTransformerEngine(), torch.randn(4, 32)
            watch = Watch(nn.Sequential(layer), x)
            change(layer)
            if way == "whole":
                watch.sites._layers[0].before = None
            found.append(watch.step(lambda layer=layer, x=x: layer(x).square().mean().backward()))
            assert len(found[-1]) == 3
        assert found[0] == found[1]


def test_nothing_of_the_program_is_kept():
    model, x = net(), torch.randn(4, 32)
    watch = Watch(model, x)
    kept = [weakref.ref(t) for t in (model[0], model[0].weight, x)]
    del model, x
    gc.collect()
    assert [t() for t in kept] == [None] * 3
    assert not watch.sites.notes


def test_what_is_more_than_one_plain_product_is_none(monkeypatch):
    kind, x = TransformerEngine(), torch.randn(4, 32)
    layer = OfTransformerEngine()
    assert kind.product(layer, x)[0] is layer.weight
    norms = type("LayerNormLinear", (OfTransformerEngine,), {"__module__": "transformer_engine.pytorch.module.x"})()
    several, parallel = OfTransformerEngine(), OfTransformerEngine()
    several.weight_names, parallel.parallel_mode = ["weight", "bias"], "column"
    assert [kind.product(layer, x) for layer in (norms, several, parallel)] == [None] * 3
    cast = nn.Linear(32, 32)
    cast.config = None
    assert TorchAO().product(cast, x)[0] is cast.weight
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert TorchAO().product(cast, x) is None


def test_in_a_graph_a_recomputed_input_changes_nothing(monkeypatch):
    model, x = net(), torch.randn(4, 32)
    watch = Watch(model, x)
    layer = watch.sites._layers[0]

    def run():
        watch.sites.calls.input_in_graph(layer, x)
        latest = layer.latest
        with monkeypatch.context() as patched:
            patched.setattr(layer_calls, "inside_backward", lambda: True)
            watch.sites.calls.input_in_graph(layer, x)
        assert layer.latest is latest
        watch.sites.calls.gradient_in_graph(layer, torch.randn(4, 48))

    assert set(watch.step(run)) == {"0:input", "0:weight", "0:grad_output"}


class Summed(nn.Linear):
    """A product that nobody hears."""

    def forward(self, x):
        return (x.unsqueeze(-2) * self.weight).sum(-1)


class SummedToo(Summed):
    pass


def test_a_layer_that_became_of_another_class_is_told_of_as_one():
    model, x = nn.Sequential(Summed(8, 8, bias=False)), torch.randn(4, 8)
    watch = Watch(model, x)
    model[0].__class__ = SummedToo
    watch.step(lambda: model(x).square().mean().backward())
    for kind in ("Summed", "SummedToo"):
        assert f"Layers of class {kind} are judged as linear layers of their input and gradient." in watch.sites.notes


class Boxed(Summed):
    boxed = True

    def forward(self, x):
        y = super().forward(x).bfloat16()
        return {"y": y} if self.boxed else y


def test_the_dtype_is_that_of_the_first_result_that_is_a_tensor():
    model, x = nn.Sequential(Boxed(8, 8, bias=False)), torch.randn(4, 8)
    watch = Watch(nn.Sequential(nn.Identity()), x.requires_grad_())
    watch.sites.add(model, watch.collector)
    for Boxed.boxed in (True, True, False):
        watch.step(lambda: model(x))
    assert watch.sites.shown.dtype == "bfloat16"
