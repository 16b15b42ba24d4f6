"""An optimizer's step that is compiled is heard once per step, costs no graph, and is compiled once."""

import copy
import gc
import sys

import pytest
import torch
from tests.compute.nn.compiled_steps import (
    OPTIMIZERS,
    Counted,
    Plain,
    build,
    compiled,
    run,
    unheard,
    weights,
)
from torch import nn

from narrowgauge import convert
from narrowgauge.compute.nn.linear import clock_of
from narrowgauge.compute.nn.tracing import optimizer_steps, step_breaks
from narrowgauge.compute.nn.tracing import telling as known
from narrowgauge.compute.nn.tracing.optimizer_steps import hear_steps
from narrowgauge.compute.nn.tracing.telling import tell, telling

WAYS = ["step", "step in place", "update", "update and zero", "train", "whole update"]
PAIRS = [
    *[(kind, "step") for kind in OPTIMIZERS],
    *[("sgd", way) for way in WAYS[1:-1]],  # torch breaks its graph, so it is never whole
    *[("plain", way) for way in WAYS[1:]],
    ("muon", "whole update"),
]
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
    ),  # as inductor is imported
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's, of an input
]
_optim = sys.modules["torch.optim.optimizer"]  # torch.optim hides it


@pytest.mark.parametrize(("kind", "way"), PAIRS)
def test_a_compiled_step_ends_the_step_once_and_adds_no_graph(kind, way):
    with unheard():
        model, optimizer = build(kind)
        graphs, _ = run(way, model, optimizer, 12)
    heard = []
    stop = hear_steps(lambda optimizer, early: heard.append("ended"), lambda *_: heard.append("begins"))
    try:
        twin, optimizer = build(kind)
        assert run(way, twin, optimizer, 12) == (graphs, True)
    finally:
        stop()
    assert heard == ["begins", "ended"] * 12
    assert torch.equal(weights(twin), weights(model))


@pytest.mark.parametrize(
    ("kind", "way"), [("sgd", "step"), ("adamw", "update"), ("plain", "update"), ("plain", "train")]
)
def test_a_delayed_model_ends_its_step_once_per_compiled_step(kind, way):
    model, optimizer = build(kind)
    convert(model, "delayed")
    graphs, settled = run(way, model, optimizer, 12)
    assert clock_of(model).step == 12
    assert settled
    twin, optimizer = build(kind)
    with unheard():
        assert graphs == run(way, twin, optimizer, 12)[0]


def test_scales_are_those_of_a_step_that_is_not_compiled():
    found = []
    for way in ("whole update", "nothing"):
        model, optimizer = build()
        convert(model, "delayed")
        run(way, model, optimizer, 6)
        found.append(weights(model))
    assert torch.equal(*found)


def test_two_optimizers_in_one_graph_are_told_apart():
    heard = []
    stop = hear_steps(
        lambda optimizer, early: heard.append(("ended", id(optimizer), early)),
        lambda optimizer, args, kwargs: heard.append(("begins", id(optimizer), False)),
    )
    try:
        model, _ = build()
        one, two = Plain(model[0].parameters(), lr=0.1), Plain(model[1].parameters(), lr=0.1)
        counted = Counted()

        @torch.compile(backend=counted.backend, fullgraph=True)
        def update(first, second):
            first.step()
            second.step()

        for first, second in ((one, two), (one, two), (two, one)):
            model(torch.ones(2, 16)).sum().backward()
            update(first, second)
    finally:
        stop()
    turns = [(one, two), (one, two), (two, one)]
    assert heard == [
        (what, id(optimizer), what == "ended") for turn in turns for optimizer in turn for what in ("begins", "ended")
    ]


def test_a_closure_is_handed_over_and_the_step_heard_once():
    """It runs a backward pass, which is in no graph."""
    model, optimizer = build("sgd")
    heard, losses = [], []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    def begins(optimizer, args, kwargs):
        heard.append((args[1] if len(args) > 1 else kwargs["closure"]) is closure)

    stop = hear_steps(lambda *_: heard.append("ended"), begins)
    try:
        step = torch.compile(optimizer.step, backend="aot_eager")
        for _ in range(3):
            step(closure)
    finally:
        stop()
    assert heard == [True, "ended"] * 3
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("way", ["closure", "hook", "hook of all"])
def test_who_hears_of_the_end_alone_hears_it_once(way):
    model, optimizer = build("sgd")
    heard = []

    def closure():
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().mean().backward()

    with unheard():
        stop = hear_steps(lambda *_: heard.append("ended"))
        optimizer_steps.settle()
        register = {"hook": optimizer.register_step_post_hook, "hook of all": _optim.register_optimizer_step_post_hook}
        hook = register[way](lambda *_: heard.append("hook")) if way in register else None
        try:
            step = torch.compile(optimizer.step, backend="eager")
            for _ in range(4):
                closure()
                step(*[closure] * (way == "closure"))
        finally:
            stop()
            if hook is not None:
                hook.remove()
    assert heard.count("ended") == 4
    assert heard.count("hook") == 4 * (hook is not None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_graph_tells_before_it_changes_what_is_read_and_in_order(backend):
    """inductor writes in place, aot_eager at the end."""
    heard, x = [], torch.ones(4)
    handle, forget = telling(
        lambda what, reads: heard.append((what, [float(read.sum()) for read in reads], float(x.sum())))
    )

    @torch.compile(backend=backend, fullgraph=True)
    def f(x, handle):
        tell(handle, 0, [x])
        x.mul_(2.0)
        tell(handle, 1, [])
        return x + 1.0

    for before in (4.0, 8.0):
        heard.clear()
        f(x, handle)
        (first, reads, seen), (second, *_) = heard
        assert (first, reads, seen, second) == (0, [before], before, 1)
        assert float(x.sum()) == 2.0 * before
    forget()
    heard.clear()
    f(x, handle)
    assert not heard


def test_a_copied_optimizer_gets_a_handle_of_its_own():
    model, one = build()
    heard = []
    stop = hear_steps(lambda optimizer, early: heard.append(id(optimizer)))
    try:
        for optimizer in (one, copy.copy(one)):
            if optimizer is not one:
                optimizer.__dict__.update(one.__dict__)  # as wrappers do
            model(torch.ones(2, 16)).sum().backward()
            torch._dynamo.reset()
            torch.compile(optimizer.step, backend="eager")()
    finally:
        stop()
    assert heard == [id(one), id(optimizer)]


def test_what_is_known_of_an_optimizer_goes_with_it():
    torch._dynamo.reset()
    gc.collect()
    before = len(known._CALLBACKS)
    model = nn.Linear(4, 4)
    optimizer = Plain(model.parameters(), lr=0.1)
    stop = hear_steps(lambda optimizer, early: None)
    model(torch.ones(2, 4)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    stop()
    assert len(known._CALLBACKS) == before + 1
    torch._dynamo.reset()
    del optimizer, model
    gc.collect()
    assert len(known._CALLBACKS) == before


def test_nobody_hears_and_torch_has_no_hook_of_ours():
    with unheard():
        assert not _optim._global_optimizer_post_hooks
        assert not _optim._global_optimizer_pre_hooks
        stop = hear_steps(lambda optimizer, early: None)
        assert len(_optim._global_optimizer_pre_hooks) == len(_optim._global_optimizer_post_hooks) == 1
        stop()  # they would be traced for nothing
        assert not _optim._global_optimizer_pre_hooks
        assert not _optim._global_optimizer_post_hooks


@pytest.mark.parametrize("way", ["step", "step in place", "update", "update and zero"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_first_that_is_compiled_is_heard_in_a_process_that_has_compiled_none(kind, way, monkeypatch):
    """By who is told of ended steps alone, as a converted model."""
    with unheard():
        step_breaks.forget()
        monkeypatch.setattr(step_breaks, "_asked", False)
        heard = []
        stop = hear_steps(lambda *_: heard.append("ended"))
        try:
            once = compiled(way, *build(kind), Counted().backend)
            for number in range(1, 4):
                once()
                assert heard == ["ended"] * number
        finally:
            stop()


def test_a_step_in_one_graph_stays_one_with_a_hook_of_the_program_s():
    """Its hooks are traced as ever; one of its own that counts is its own affair."""
    model, optimizer = build()
    optimizer.register_step_post_hook(lambda *_: None)
    counted, heard = Counted(), []
    stop = hear_steps(lambda *_: heard.append(1))
    try:
        once = compiled("whole update", model, optimizer, counted.backend)
        for _ in range(3):
            once()
    finally:
        stop()
    assert (counted.graphs, len(heard)) == (1, 3)


class Unhashable(Plain):
    __hash__ = None

    def __eq__(self, other):
        return isinstance(other, Unhashable)


class Closed(Plain):
    """Takes no attribute that it does not know, and looks one up in a way of its own."""

    def __setattr__(self, name, value):
        if name.startswith("_narrowgauge"):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __getattr__(self, name):
        return self.__dict__["options"][name]


@pytest.mark.parametrize("kind", [Unhashable, Closed])
def test_an_optimizer_may_be_an_odd_object(kind, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "odd", lambda params: kind(params, lr=0.1))
    model, optimizer = build("odd")
    convert(model, "delayed")
    heard = []
    stop = hear_steps(lambda optimizer, early: heard.append(early))
    try:
        run("whole update", model, optimizer, 3)
        optimizer.step()
    finally:
        stop()
    assert heard == [True, True, True, False]
    assert clock_of(model).step == 3  # no gradients were there for the last
