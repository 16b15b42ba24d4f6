"""Which modules a function's code names."""

import functools
from types import MethodType

import pytest
import torch
from torch import nn

from narrowgauge.session.models.naming import named_by

LAYER = nn.Linear(2, 2)


def through_a_global(x):
    return [LAYER(each) for each in x]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.scale = nn.Linear(2, 2), 3.0

    def forward(self, x):
        return self.part(x)

    def calls_itself(self, x):
        return self(x).square()

    def calls_forward(self, x):
        return self.forward(x)

    def hands_itself_on(self, x):
        return torch.utils.checkpoint.checkpoint(self, x)

    def calls_a_part(self, x):
        return torch.stack([self.part(each) for each in x])

    def calls_none(self, y):
        self.scale += 1
        return [(each * self.scale).to(each.dtype) for each in y]


class Trainer:
    def __init__(self, model):
        self._model, self.scale = model, 3.0

    @property
    def model(self):
        return self._model

    def calls(self, x):
        return self.model(x)

    def calls_by_another(self, x):
        return self.calls(x)

    @torch.autocast("cpu", enabled=False)
    def decorated(self, x):
        return self._model(x)

    def in_a_lambda(self, x):
        return (lambda: self._model(x))()

    @staticmethod
    def doubled(y):
        return 2 * y

    def calls_none(self, y):
        return self.doubled(y) * self.scale


@pytest.mark.parametrize("name", [name for name in vars(Net) if name.startswith(("calls", "hands"))])
def test_a_method_of_a_module(name):
    net = Net()
    found = [module for module in named_by(getattr(net, name)) if module is net]
    assert found == ([] if name == "calls_none" else [net])


@pytest.mark.parametrize("name", ["calls", "calls_by_another", "decorated", "in_a_lambda", "calls_none"])
def test_a_method_of_what_holds_a_module(name):
    trainer = Trainer(nn.Linear(2, 2))
    assert set(named_by(getattr(trainer, name))) == (set() if name == "calls_none" else {trainer.model})


def test_functions():
    layer = nn.Linear(2, 2)

    def through_a_closure(x):
        return layer(x)

    def through_another(x):
        return through_a_closure(x)

    def not_yet(x):
        return missing(x)

    assert set(named_by(through_another)) == {layer}
    assert set(named_by(functools.partial(through_another))) == {layer}
    assert set(named_by(through_a_global)) == {LAYER}
    for none in (not_yet, torch.relu, functools.partial(torch.relu), None, Net):
        assert list(named_by(none)) == []
    missing = None


class Slots:
    """Holds a model, and has no dictionary."""

    __slots__ = ("model",)

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)


def decorated(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


def of_what_holds_it(model):
    trainer, slots, named, listed = Trainer(model), Slots(model), {"it": model}, [model]
    forward, method, part = model.forward, trainer.calls, functools.partial(lambda net, x: net(x), model)
    return {
        "attribute": lambda x: trainer._model(x),
        "method": lambda x: trainer.calls(x),
        "decorated": decorated(trainer.calls),
        "slots": lambda x: slots.model(x),
        "called": slots,
        "dict": lambda x: named["it"](x),
        "list": lambda x: listed[0](x),
        "forward": lambda x: forward(x),
        "bound": lambda x: method(x),
        "partial": lambda x: part(x),
        "default": lambda x, net=model: net(x),
        "keyword": lambda x, *, net=model: net(x),
    }


@pytest.mark.parametrize("name", of_what_holds_it(nn.Linear(2, 2)))
def test_what_an_object_in_its_scope_holds(name):
    layer = nn.Linear(2, 2)
    assert set(named_by(of_what_holds_it(layer)[name])) == {layer}


def test_a_model_that_it_does_not_call():
    layer = nn.Linear(2, 2)
    trainer, named = Trainer(layer), {"it": layer}
    for function in (
        lambda y: y * trainer.scale,
        lambda y: y + sum(p.sum() for p in layer.parameters()),
        lambda y: y + sum(p.sum() for p in trainer.model.parameters()),
        lambda y: y + sum(p.sum() for p in named["it"].parameters()),
        lambda y: y if layer.training else -y,
    ):
        assert list(named_by(function)) == []
    assert set(named_by(lambda x: layer(x) if layer.training else x)) == {layer}


def test_nothing_of_the_programs_is_run():
    ran = []

    class Curious:
        __slots__ = ("model",)

        @property
        def __class__(self):
            ran.append("__class__")
            raise RuntimeError

        @property
        def made(self):
            ran.append("made")

        def __getattr__(self, name):
            ran.append(name)
            raise KeyError(name)

        def calls(self, x):
            return self.model(self.made, x)

    class Asked(Curious):
        def __getattribute__(self, name):
            ran.append(name)
            raise KeyError(name)

    layer, curious = nn.Linear(2, 2), Curious()
    curious.model = layer
    for function in (curious.calls, lambda x: curious.calls(x), decorated(curious.calls), curious):
        assert set(named_by(function)) <= {layer}
    assert set(named_by(curious.calls)) == {layer}
    assert list(named_by(MethodType(vars(Curious)["calls"], Asked()))) == []
    assert ran == []
