"""Which modules a function's code names."""

import functools

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
