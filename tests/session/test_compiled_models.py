"""Of which models the call of something compiled is."""

import copy

import pytest
import torch
from tests.session.inline import followed
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.store import open_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's, of an input
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # its import's
]


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()


def compiled(function):
    return torch.compile(function, backend="eager")


def trains(forward, x, *optimizers):
    forward(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def calling(module):
    def call(x):
        return module(x)

    return call


class Holder:
    """Has its model for all of its objects."""

    model = nn.Linear(8, 8)

    def calls(self, x):
        return self.model(x)


class Itself(nn.Linear):
    def calls(*args):
        return args[0](args[1])


def of_each_way(what):
    """A model, and a function that calls it."""
    if what == "one closure of several":
        model, after = nn.Linear(8, 8), nn.Linear(8, 8)
        first, second = calling(model), calling(after)
        return model, lambda x: second(first(x))
    if what == "a class's":
        return Holder.model, Holder().calls
    if what == "in its arguments":
        model = Itself(8, 8)
        return model, model.calls
    model = nn.Linear(8, 8)
    return model, lambda x: model.train()(x)


@pytest.mark.parametrize("what", ["one closure of several", "a class's", "in its arguments", "in its mode"])
def test_a_model_that_trained_before_a_compiled_function_called_it(tmp_path, what):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        model, function = of_each_way(what)
        optimizer, call = sgd(model), compiled(function)
        for forward in (model, call, call):
            trains(forward, torch.ones(4, 8), optimizer)
    assert session.facts()["models"] == 1
    assert writer.column("tokens") == {1: 4.0, 2: 4.0, 3: 4.0}
    assert not session.hearing.notes


@pytest.mark.parametrize("named", [True, False])
def test_a_model_of_a_compiled_function_is_heard_where_the_program_calls_it_itself(tmp_path, named):
    with followed(tmp_path, every=1, judge="current", compiling=True) as (session, writer):
        model = nn.Linear(8, 8)
        optimizer = sgd(model)
        itself = (lambda x: model(input=x)) if named else model
        call = compiled(lambda x: model(x))
        for forward in (call, itself, call, itself, itself):
            trains(forward, torch.ones(4, 8), optimizer)
        assert not model._forward_hooks
    assert writer.column("tokens") == dict.fromkeys(range(1, 6), 4.0)
    assert [step for step, sites, _ in writer.tensors if "(model):grad_output" in sites] == [1, 2, 3, 4, 5]
    assert session.facts()["models"] == 1
    assert not session.hearing.notes


def test_one_that_is_frozen_by_then_teaches(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        teacher, student, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.ones(4, 8)
        optimizers = sgd(teacher), sgd(student)
        calls = compiled(lambda x: teacher(x)), compiled(lambda x: student(x))
        for call, optimizer in zip(calls, optimizers, strict=True):
            trains(call, x, optimizer)
        teacher.requires_grad_(False)
        for _ in range(2):
            teacher(torch.ones(16, 8))
            trains(calls[1], x, optimizers[1])
    assert list(writer.column("tokens").values()) == [4.0] * 4
    assert not session.hearing.notes


@pytest.mark.parametrize("every", [2, 100])
def test_a_batch_that_a_compiled_function_fails_on_counts_nothing(tmp_path, every):
    with followed(tmp_path, every=every, judge="current", compiling=True) as (session, writer):
        model = nn.Linear(8, 8)

        def fails_on_small_ones(x):
            y = model(x)
            if x.shape[0] < 4:
                raise RuntimeError("the program's")
            return y

        optimizer, call = sgd(model), compiled(fails_on_small_ones)
        for _ in range(4):
            with pytest.raises(RuntimeError, match="the program's"):
                call(torch.ones(2, 8))
            trains(call, torch.ones(4, 8), optimizer)
    assert writer.column("tokens") == dict.fromkeys(range(1, 5), 4.0)
    assert not session.hearing.notes


def test_a_compiled_step_that_fails_when_it_has_learned_keeps_its_tokens(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        model = nn.Linear(8, 8)
        optimizer = sgd(model)

        def step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            raise RuntimeError("the program's")

        call = compiled(step)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="the program's"):
                call(torch.ones(4, 8))
    assert writer.column("tokens") == dict.fromkeys(range(1, 4), 4.0)
    assert not session.hearing.notes


@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize("larger", [16, 64])
@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_models_that_nobody_but_compiled_functions_calls(tmp_path, first, larger, through):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        generator = nn.Sequential(nn.Linear(8, larger), nn.ReLU(), nn.Linear(larger, 16))
        discriminator = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))
        each = {"generator": sgd(generator), "discriminator": sgd(discriminator)}
        generates, judges = (lambda z: generator(z)), (lambda x: discriminator(x))
        calls = {
            "generator": compiled((lambda z: discriminator(generator(z))) if through else generates),
            "discriminator": compiled(judges),
        }
        inputs = {"generator": torch.ones(3, 8), "discriminator": torch.ones(4, 16)}
        trains(calls[first], inputs[first], each[first])
        assert session.facts()["models"] == 1 + (through and first == "generator")
        if not through:
            assert session.roots.called_in(session.hearing.turn) == [{"generator": generator}.get(first, discriminator)]
        other = next(name for name in each if name != first)
        for name in (other, first, other):
            trains(calls[name], inputs[name], each[name])
    assert session.facts()["models"] == 2
    assert list(writer.column("tokens").values()) == [len(inputs[name]) for name in (first, other) * 2]
    assert not session.hearing.notes


def adversaries():
    """Objects that have two models, and methods that were compiled in their class, as functions."""

    class Adversaries:
        def __init__(self, width):
            self.generator = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 16))
            self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))

        @compiled
        def judges(self, x):
            return self.discriminator(x)

        @compiled
        def generates(self, *given):
            return self.discriminator(self.generator(given[0]))

    return Adversaries


@pytest.mark.parametrize("width", [16, 128])
def test_models_of_an_object_whose_methods_were_compiled_in_its_class(tmp_path, width):
    with followed(tmp_path, every=1, judge="current", compiling=True) as (session, writer):
        kind = adversaries()
        every = [kind(width), kind(width)]  # which share the compiled functions
        optimizers = [[sgd(one.discriminator), sgd(one.generator)] for one in every]
        for _ in range(2):
            for one, (of_judge, of_generator) in zip(every, optimizers, strict=True):
                trains(one.judges, torch.ones(4, 16), of_judge)
                trains(one.generates, torch.ones(3, 8), of_generator)
    assert session.facts()["models"] == 4
    assert list(writer.column("tokens").values()) == [4.0, 3.0] * 4
    assert not session.hearing.notes


def test_an_object_at_the_address_of_another_has_a_model_of_its_own(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):

        class Slotted:
            __slots__ = ("model",)

            @compiled
            def calls(self, x):
                return self.model(x)

        models = [nn.Linear(8, 8) for _ in range(3)]
        optimizers, addresses = [sgd(model) for model in models], set()
        for model, optimizer in zip(models, optimizers, strict=True):
            one = Slotted()
            one.model = model
            trains(one.calls, torch.ones(4, 8), optimizer)
            addresses.add(id(one))
            del one
    assert session.facts()["models"] == 3
    assert len(addresses) < 3
    assert list(writer.column("tokens").values()) == [4.0] * 3


def test_an_evaluation_by_a_method_that_was_compiled_in_its_class_is_its_models(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (_, writer):

        class Trainer:
            def __init__(self):
                self.model = nn.Linear(8, 8)

            @compiled
            def loss(self, x):
                return (self.model(x) - x).square().mean()

        one, x = Trainer(), torch.ones(4, 8)
        optimizer, expected = sgd(one.model), {}
        for step in (1, 2, 3):
            trains(one.loss, x, optimizer)
            with torch.no_grad():
                expected[step] = float(one.loss(x + step))
    assert writer.column("eval_loss") == pytest.approx(expected)


def test_models_that_a_function_is_given_later_or_holds_beside_are_called(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        body, head, inner, late = (nn.Linear(8, 8) for _ in range(4))
        call = compiled(lambda outer, other, x: outer(other(inner(x))))
        optimizer = sgd(body, head, inner, late)
        for other in (head, late):
            trains(lambda x, other=other: call(body, other, x), torch.ones(4, 8), optimizer)
    assert session.facts()["models"] == 4
    assert list(writer.column("tokens").values()) == [4.0] * 2


class Empty(nn.Linear):
    """Says that it has nothing in it."""

    def __len__(self):
        return 0


def test_models_that_are_false_are_told_apart(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, _):
        models, call = [Empty(8, 8), Empty(8, 8)], compiled(lambda model, x: model(x))
        optimizers = [sgd(model) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            trains(lambda x, model=model: call(model, x), torch.ones(4, 8), optimizer)
    assert session.facts()["models"] == 2


@pytest.mark.parametrize("by_name", [False, True])
def test_a_function_that_is_given_two_models_calls_both(tmp_path, by_name):
    inner, outer = nn.Linear(8, 16), nn.Linear(16, 16)
    x = torch.ones(3, 8)
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        optimizers, call = (sgd(inner), sgd(outer)), compiled(lambda outer, inner, x: outer(inner(x)))
        for _ in range(2):
            forward = (lambda x: call(x=x, inner=inner, outer=outer)) if by_name else lambda x: call(outer, inner, x)
            trains(forward, x, *optimizers)
    assert session.facts()["models"] == 2
    assert list(writer.column("tokens").values()) == [3.0, 3.0]


def test_a_wrapper_and_what_it_wraps_are_one_model(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        model = nn.Linear(8, 8)
        wrapper = nn.DataParallel(model)
        call, optimizer = compiled(lambda x: model(x) if not wrapper.training else wrapper(x)), sgd(model)
        for _ in range(2):
            trains(call, torch.ones(4, 8), optimizer)
        assert session.roots.called_in(session.hearing.turn) == [wrapper]
    assert session.facts()["models"] == 1
    assert writer.column("tokens") == {1: 4.0, 2: 4.0}


def test_where_no_model_that_trains_is_named_the_whole_is_called(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        fixed, held = nn.Linear(8, 8), [[nn.Sequential(nn.Linear(8, 8))]]  # so far in no container is looked
        call, optimizer = compiled(lambda x: fixed(held[0][0](x))), sgd(held[0][0])
        for _ in range(2):
            trains(call, torch.ones(4, 8), optimizer)
        assert session.roots.called_in(session.hearing.turn) == held[0]
    assert writer.column("tokens") == {1: 4.0, 2: 4.0}


def test_a_function_that_reads_a_weight_of_a_part_is_no_call_of_a_model(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        model, x = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)), torch.ones(4, 8, dtype=torch.long)
        head, optimizer = model[1], sgd(model)

        def penalized(y, target):
            return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()) + head.weight.square().sum()

        loss = compiled(penalized)
        for _ in range(3):
            trains(lambda x: loss(model(x), x), x, optimizer)
    assert session.facts()["models"] == 1
    assert writer.column("tokens") == {1: 32.0, 2: 32.0, 3: 32.0}


@pytest.mark.parametrize("compiles", [0, 1, 2])
def test_a_model_that_is_compiled_in_place_is_called(tmp_path, compiles):
    evaluated = []
    with followed(tmp_path, every=2, compiling=True) as (session, writer):
        model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(4, 8)
        optimizer = sgd(model)
        for step in range(4):
            if step == compiles:
                model.compile(backend="eager")
            trains(model, x, optimizer)
            with torch.no_grad():
                evaluated.append(nn.functional.mse_loss(model(x), x).item())
    assert session.facts()["models"] == 1
    assert writer.column("tokens") == dict.fromkeys(range(1, 5), 4.0)
    assert list(writer.column("eval_loss").values()) == pytest.approx(evaluated)
    assert not session.hearing.notes


class Stepping(nn.Sequential):
    def training_step(self, x):
        return self(x).square().mean()


def test_methods_that_are_compiled_by_what_made_a_compiled_module_are_heard(tmp_path):
    """Lightning takes such a module apart, and never calls it."""
    with followed(tmp_path, every=2, judge="current", compiling=True) as (_, writer):
        model = Stepping(nn.Linear(8, 8))
        whole = compiled(model)
        model.training_step = whole.dynamo_ctx(model.training_step)
        optimizer, said = sgd(model), []
        for _ in range(4):
            loss = model.training_step(torch.randn(4, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            said.append(loss.item())
    assert list(writer.column("loss").values()) == pytest.approx(said)
    assert list(writer.column("tokens").values()) == [4] * 4
    assert {step for step, sites, _ in writer.tensors if "0:input" in sites} == {2, 4}


def test_a_copy_of_a_compiled_module_is_made_with_torchs_own_context(tmp_path):
    alone = type(compiled(nn.Linear(8, 8)).dynamo_ctx)
    with followed(tmp_path, every=2, compiling=True):
        whole = compiled(nn.Linear(8, 8))
        assert whole.dynamo_ctx.fullgraph is False
        assert type(copy.deepcopy(whole).dynamo_ctx) is alone


def test_a_module_that_is_compiled_in_place_and_does_not_train_is_no_model(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, writer):
        teacher, model = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))
        teacher.compile(backend="eager")
        optimizer = sgd(model)
        for _ in range(3):
            target = teacher(torch.ones(2, 8)).detach()
            trains(lambda x: model(x)[:2] - target, torch.ones(4, 8), optimizer)  # noqa: B023
    assert session.facts()["models"] == 1
    assert writer.column("tokens") == {1: 4.0, 2: 4.0, 3: 4.0}


def test_parts_that_are_compiled_in_place_are_called_each(tmp_path):
    with followed(tmp_path, every=100, compiling=True) as (session, _):
        whole = nn.ModuleDict({"encoder": nn.Linear(8, 4), "decoder": nn.Linear(4, 8)})
        optimizer = sgd(whole)
        for part in whole.values():
            part.compile(backend="eager")
        for _ in range(2):
            trains(lambda x: whole["decoder"](whole["encoder"](x)), torch.ones(4, 8), optimizer)
        assert session.roots.called_in(session.hearing.turn) == list(whole.values())
    assert session.facts()["models"] == 1


class Ran:
    """A backend that counts how often its graphs run."""

    count = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.count += 1
            return graph.forward(*args)

        return run


def test_a_compiled_step_of_an_optimizer_that_is_not_watched_ends_no_recording(tmp_path):
    model, other, ran = nn.Linear(16, 8), nn.Linear(16, 8), Ran()
    optimizer, others = sgd(model), sgd(other)
    with ng.watch(model, out=tmp_path / "run", every=2):
        forward, others_step = torch.compile(model, backend=ran), torch.compile(others.step, backend="eager")
        for _ in range(4):
            for rows in (4, 2):
                forward(torch.ones(rows, 16)).square().mean().backward()
                other(torch.ones(4, 16)).square().mean().backward()
                others_step()
            optimizer.step()
            optimizer.zero_grad()
    assert ran.count == 4  # of 8: steps 2 and 4 are recorded, and run uncompiled
    assert open_run(tmp_path / "run").scalars("tokens")["tokens"].tolist() == [6.0] * 4
