"""What a function's code does with what it names."""

import pytest
import torch
from torch import nn

from narrowgauge.session.models.naming import named_by

LAYER = nn.Linear(2, 2)


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

    def hands_itself_alone(self):
        return torch.export.export(self, (torch.ones(2),))

    def hands_itself_on_in_a_lambda(self, x):
        return (lambda: self(x))()

    def hands_itself_on_beside_a_lambda(self, x):
        return self((lambda: x * self.scale)())

    def calls_a_part(self, x):
        return torch.stack([self.part(each) for each in x])

    def gets_itself_in_its_arguments(*args):
        return args[0].scale * args[1]

    def gets_by_a_name(*args, scale=1.0):
        return scale * args[0].scale * args[1]

    def gets_its_own_and_more(*args):
        args[0].train()
        return [args[1] for each in args[2]]

    def takes_by_name(self, *, scale):
        return self.scale * scale

    def takes_another_of_its_name(self, y):
        return (lambda self: self + 1)(y)

    def is_replaced(self, y):
        self = y
        return self.scale

    def takes_none():
        return 2

    def calls_none(self, y):
        self.scale += 1
        self.one = self.other = y
        return [(each * self.scale).to(each.dtype) for each in y]

    def calls_in_its_arguments(*args):
        return args[0](args[1])

    def calls_beside_a_name(*args, scale=1.0):
        return args[0](scale * args[1])

    def calls_one_of_its_arguments(*args):
        at = 0
        return args[at](args[1])

    def hands_its_arguments_on(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(*args, **kwargs)

    def calls_in_its_mode(self, x):
        return self.eval()(x)

    def calls_under_its_name_of_arguments(*args):
        self, x = args
        return self(x)

    def calls_after_a_variable(self, x):
        y = 2 * x
        return self(y)

    def calls_in_a_comprehension(self, x):
        return [self(each) for each in x]

    def calls_in_a_class(self, x):
        class Once:
            y = self(x)

        return Once.y


class Trainer:
    def __init__(self, model):
        self.model, self.scale = model, 3.0


@pytest.mark.parametrize("name", [name for name in vars(Net) if name.startswith(("calls", "hands"))])
def test_a_method_of_a_module(name):
    net = Net()
    found = [module for module in named_by(getattr(net, name)) if module is net]
    assert found == ([] if name == "calls_none" else [net])
    assert set(named_by(getattr(net, name))) <= {net, net.part}


@pytest.mark.parametrize("name", [name for name in vars(Net) if name.startswith(("gets", "takes", "is"))])
def test_a_method_of_a_module_that_calls_none(name):
    assert list(named_by(getattr(Net(), name))) == []


@pytest.mark.parametrize("name", ["hands_itself_on", "calls_a_part"])
def test_a_method_of_a_module_names_its_parts(name):
    net = Net()
    assert set(named_by(getattr(net, name))) == {net, net.part}


def test_a_variable_of_a_globals_name_and_a_global_that_is_written():
    another = nn.Linear(2, 2)
    assert set(named_by((lambda LAYER: lambda x: LAYER(x))(another))) == {another}
    assert list(named_by(defined("global layer; layer = x", layer=LAYER))) == []


def test_a_function_with_many_names():
    many = "; ".join(f"x.name{at}" for at in range(300))
    assert list(named_by(defined(f"{many}; layer.parameters()", layer=LAYER))) == []
    assert set(named_by(defined(f"{many}; layer(x)", layer=LAYER))) == {LAYER}


def test_of_several_the_one_that_is_read_first_comes_first():
    net, head, before, LAST = (nn.Linear(2, 2) for _ in range(4))
    assert list(named_by(lambda x: LAST(head(before(net(x)))))) == [LAST, head, before, net]
    scope = {name: nn.Linear(2, 2) for name in ("net", "a", "head", "b")}
    assert list(named_by(defined("return net(a(head(b(x))))", **scope))) == list(scope.values())


@pytest.mark.parametrize(
    "asked",
    ["buffers", "named_buffers", "named_parameters", "parameters", "state_dict", "training", "zero_grad"],
)
def test_what_is_asked_of_a_model_for_its_weights_or_its_mode_is_no_call(asked):
    layer = nn.Linear(2, 2)
    assert list(named_by(eval(f"lambda y: (y, layer.{asked})", {"layer": layer}))) == []
    assert set(named_by(eval(f"lambda {asked}: layer({asked})", {"layer": layer}))) == {layer}


def defined(line, **scope):
    exec(f"def call(x, mode=None):\n  {line}", scope)
    return scope["call"]


@pytest.mark.parametrize("asked", ["eval()", "train()", "train(mode)", "train(mode=mode)", "requires_grad_(False)"])
def test_a_model_behind_a_method_that_returns_it_is_called_unless_that_is_dropped(asked):
    trainer, layer = Trainer(LAYER), LAYER
    for model in ("layer", "trainer.model", "named['it']"):
        scope = {"layer": layer, "trainer": trainer, "named": {"it": layer}}
        for line in (f"{model}.{asked}; return x", f"{model}.{asked}"):
            assert list(named_by(defined(line, **scope))) == []
        for line in (f"return {model}.{asked}(x)", f"own = {model}.{asked}; return own(x)", f"y = {model}.{asked}(x)"):
            assert set(named_by(defined(line, **scope))) == {layer}


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


def test_what_a_function_defines_reads():
    layer = nn.Linear(2, 2)

    def in_a_class_of_a_global(x):
        class Once:
            part = LAYER

        return Once.part(x)

    def in_a_class_of_a_closure(x):
        class Once:
            part = layer

        return Once.part(x)

    assert set(named_by(in_a_class_of_a_global)) == {LAYER}
    assert set(named_by(in_a_class_of_a_closure)) == {layer}
    assert list(named_by(lambda LAYER: 2 * LAYER)) == []  # an argument of that name
