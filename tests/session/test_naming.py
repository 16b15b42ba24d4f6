"""Which modules a function's code names."""

import functools
from itertools import islice
from types import MethodType, ModuleType

import pytest
import torch
from torch import nn

from narrowgauge.session.models.naming import MOST_READ, modules_in, named_by

LAYER = nn.Linear(2, 2)


def through_a_global(x):
    return [LAYER(each) for each in x]


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

    def hands_itself_on(self, x):
        return decorated(self, x)

    def forward(self, x):
        return self.made_once(x)

    @functools.cached_property
    def made_once(self):
        return torch.no_grad()(self._model)

    @staticmethod
    def doubled(y):
        return 2 * y

    @staticmethod
    def one():
        return 1

    def two():  # asked of the class
        return 2

    @staticmethod
    def layered(x):
        return LAYER(x)

    @classmethod
    def made(cls, x):
        return LAYER(cls.doubled(x))

    def calls_none(self, y):
        return self.doubled(y) * self.scale * self.one() * Trainer.two()

    def calls_a_static_method(self, x):
        return self.layered(x)

    def calls_a_class_method(self, x):
        return self.made(x)


HOLDING = "calls", "calls_by_another", "decorated", "in_a_lambda", "hands_itself_on", "forward", "calls_none"


@pytest.mark.parametrize("name", HOLDING)
def test_a_method_of_what_holds_a_module(name):
    trainer = Trainer(nn.Linear(2, 2))
    assert set(named_by(getattr(trainer, name))) == (set() if name == "calls_none" else {trainer.model})


@pytest.mark.parametrize("name", ["calls_a_static_method", "calls_a_class_method", "layered", "made"])
def test_a_method_without_its_object(name):
    assert set(named_by(getattr(Trainer(None), name))) == {LAYER}


class Shared:
    """Holds a model for all of its objects."""

    net = nn.Linear(2, 2)

    def calls(self, x):
        return self.net(x)

    @classmethod
    def of_class(cls, x):
        return cls.net(x)

    def calls_none(self, x):
        return x


class Inherits(Shared):
    __slots__ = ("scale",)

    def overrides(self, x):
        return self.net(self.scale * x)

    def calls(self, x):
        return super().calls(x)


class Replaces(Shared):
    def __init__(self):
        self.net = LAYER

    def calls_none(self, x):
        return self.calls(x)


class OfModules(nn.Module):
    net = Shared.net

    def forward(self, x):
        return self.net(x)


def test_a_model_of_a_class():
    shared, inherits, of_modules = Shared(), Inherits(), OfModules()
    for function in (
        *(shared.calls, shared.of_class, Shared.of_class, inherits.calls, inherits.overrides, Inherits.of_class),
        *(lambda x: shared.net(x), lambda x: inherits.net(x), lambda x: Inherits.net(x), lambda x: Shared.net(x)),
    ):
        assert set(named_by(function)) == {Shared.net}
    assert set(named_by(of_modules.forward)) == {of_modules, Shared.net}
    assert set(named_by(Replaces().calls)) == {LAYER}
    assert list(named_by(shared.calls_none)) == list(named_by(lambda: Slots.model)) == []


def test_what_a_method_calls_of_a_class_above_its_own():
    class Above(Trainer):
        def calls(self, x):
            return super().calls(2 * x)

        def doubled(self, y):
            return self.calls_none(y)

        def calls_none(self, y):  # that of the class above calls none, either
            return 2 * y

        def in_a_lambda(self, x):  # that of the class above does
            return 3 * x

        def beside(self, x):
            return self.in_a_lambda(x)

    trainer = Above(nn.Linear(2, 2))
    assert set(named_by(trainer.calls)) == {trainer.model}
    assert list(named_by(trainer.doubled)) == list(named_by(trainer.beside)) == []


def calling(model):
    def call(x):
        return model(x)

    return call


def test_closures_of_one_code_are_told_apart():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    one, other = calling(first), calling(second)
    assert set(named_by(lambda x: one(x) + other(x))) == {first, second}


def test_methods_of_two_objects_are_told_apart():
    one, other = Trainer(nn.Linear(2, 2)), Trainer(nn.Linear(2, 2))
    assert set(named_by(lambda x: one.calls(x) + other.calls(x))) == {one.model, other.model}


def test_functions():
    layer = nn.Linear(2, 2)

    def through_a_closure(x):
        return layer(x)

    def through_another(x):
        return through_a_closure(x)

    def not_yet(x):
        return missing(x)

    def beside_what_is_not_yet(x):
        return through_a_closure(missing(x))

    assert set(named_by(through_another)) == {layer}
    assert set(named_by(functools.partial(through_another))) == {layer}
    assert set(named_by(beside_what_is_not_yet)) == {layer}
    assert set(named_by(through_a_global)) == {LAYER}
    for none in (not_yet, torch.relu, functools.partial(torch.relu), None, Shared):
        assert list(named_by(none)) == []
    missing = None


def test_functions_that_call_each_other():
    def first(x):
        return second(LAYER(x))

    def second(x):
        return first(x)

    assert list(islice(named_by(first), 3)) == [LAYER]


@pytest.mark.parametrize("beyond", [0, 1])
def test_so_many_functions_are_read(beyond):
    call = through_a_global
    for at in range(MOST_READ - 1 + beyond):
        call = eval(f"lambda x{at}: call(x{at})", {"call": call})
    assert list(named_by(call)) == [LAYER] * (1 - beyond)


def of(package, function):
    function.__module__ = f"{package}.of_its_own"
    return function


def test_what_a_librarys_function_reads():
    layer = nn.Linear(2, 2)
    trainer = Trainer(layer)
    calls, reads = of("library", lambda x: layer(x)), of("library", lambda x: trainer.model(x))
    torchs = of("torch", lambda x: layer(x))
    assert set(named_by(lambda x: calls(x))) == {layer}
    assert list(named_by(lambda x: reads(x))) == []
    assert set(named_by(reads)) == {layer}  # itself
    assert list(named_by(lambda x: torchs(x))) == []


def test_what_is_read_of_an_imported_module():
    library, layer = ModuleType("library"), nn.Linear(2, 2)
    library.layer, library.call = layer, of("library", lambda x: layer(x))
    assert set(named_by(lambda x: library.layer(x))) == {layer}
    assert list(named_by(lambda x: library.call(x))) == []


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
    by_name = functools.partial(lambda x, net: net(x), net=model)
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
        "partial by name": lambda x: by_name(x),
        "default": lambda x, net=model: net(x),
        "keyword": lambda x, *, net=model: net(x),
    }


@pytest.mark.parametrize("name", of_what_holds_it(nn.Linear(2, 2)))
def test_what_an_object_in_its_scope_holds(name):
    layer = nn.Linear(2, 2)
    assert set(named_by(of_what_holds_it(layer)[name])) == {layer}


class Odd(Trainer):
    """Has a name of torch's."""

    _modules = None

    def __init__(self, model):
        super().__init__(model)
        self._modules = None


class Late(Slots):
    """Has a slot that nothing was put into, before another."""

    __slots__ = ("absent", "second")

    def __init__(self, model):
        self.second = model


@pytest.mark.parametrize(
    "around",
    [
        lambda layer: layer,
        lambda layer: {"it": layer, "scale": 3.0},
        lambda layer: [3.0, layer],
        lambda layer: (3.0, layer),
        lambda layer: functools.partial(print, layer),
        lambda layer: functools.partial(print, end=layer),
        Trainer,
        Slots,
        Odd,
        Late,
    ],
)
def test_modules_in_what_a_function_is_given(around):
    layer = nn.Linear(2, 2)
    assert list(modules_in(around(layer))) == [layer]


def test_no_module_is_in_what_is_not_of_the_program_or_far_in_a_container():
    layer = nn.Linear(2, 2)
    for none in (None, 3.0, torch.ones(2), torch.utils.data.DataLoader([layer], collate_fn=layer), {layer}):
        assert list(modules_in(none)) == []
    assert list(modules_in([*[None] * (MOST_READ - 1), layer])) == [layer]
    assert list(modules_in([*[None] * MOST_READ, layer])) == []


def test_an_attribute_of_the_programs_with_a_name_of_torchs():
    odd = Odd(LAYER)
    assert set(named_by(lambda x: odd.model(x))) == {LAYER}


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
