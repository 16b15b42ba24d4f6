"""Calls of what torch has compiled are told, whoever compiled it and when, and nothing is compiled for that."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from narrowgauge.session.doors import entries
from narrowgauge.session.doors.entries import Entries


@pytest.fixture
def told():
    torch._dynamo.reset()
    said, errors = [], []

    def entered():
        said.append("in")
        return lambda: said.append("out")

    door = Entries(entered, errors.append)
    door.said, door.errors = said, errors
    yield door
    door.close()
    assert "enter_exit_hooks" not in vars(torch._dynamo.eval_frame._TorchDynamoContext)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_calls_of_what_was_compiled_before_and_meanwhile_are_told_while_it_is_open(told):
    x, module = torch.ones(3), nn.Linear(3, 3)
    function = torch.compile(lambda x: x * 2, backend="eager", dynamic=True)
    module.compile(backend="eager")
    function(x), module(x)
    before = graphs()
    assert told.open()
    assert told.open()  # twice is harmless
    function(x), module(x)
    assert told.said == ["in", "out"] * 2
    assert graphs() == before
    later = torch.compile(lambda x: x + 1, backend="eager", dynamic=True)
    later(x)
    told.close()
    function(x), module(x), later(torch.ones(4))
    assert told.said == ["in", "out"] * 3
    assert graphs() == before + 1  # its own hooks, by which it is dynamic, are there


def test_an_error_of_the_programs_ends_a_call(told):
    def fails(x):
        raise ValueError

    function = torch.compile(fails, backend="eager")
    told.open()
    with pytest.raises(ValueError):
        function(torch.ones(3))
    assert told.said == ["in", "out"]


def test_an_error_of_ours_is_told_and_reaches_nobody(told):
    def entered():
        raise KeyError("ours")

    told._entered = entered
    told.open()
    assert torch.compile(lambda x: x * 2, backend="eager")(torch.ones(1)) == 2
    assert [str(error) for error in told.errors] == ["'ours'"]


def refused(function):
    """Call what is compiled with `fullgraph=True` where torch makes no graph."""
    with FlopCounterMode(display=False):
        function(torch.ones(3))


def test_a_call_that_torch_refuses_when_it_has_returned_is_over_when_its_error_comes(told):
    function, kept = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True), []
    told.open()
    for _ in range(3):
        try:
            refused(function)
        except RuntimeError as error:  # torch 2.13 on; what is older says nothing
            assert told.said[-1] == "out"
            kept.append(error)
    assert told.said == ["in", "out"] * 3
    assert not told._calls
    assert not told.errors
    told.close()
    assert torch._dynamo.eval_frame.get_skip_reasons.__module__ == "torch._dynamo.eval_frame"
    assert not hasattr(torch._dynamo.eval_frame.get_skip_reasons, "__wrapped__")


def unbegun(function, kept):
    """torch finds no compiler for what is compiled, which it is told of in the last moment."""
    try:
        with torch.compiler.set_stance("default", force_backend="none of this name"):
            function(torch.ones(3))
    except Exception as error:
        kept.append(error)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_call_that_an_error_leaves_without_a_word_is_over_when_it_is_looked_for(told, elsewhere):
    function, kept = torch.compile(lambda x: x * 2, backend="eager"), []
    told.open()
    if elsewhere:
        thread = threading.Thread(target=unbegun, args=(function, kept))
        thread.start()
        thread.join()
    else:
        unbegun(function, kept)
    assert len(kept) == 1
    assert told.said == ["in"]
    told.settle()
    assert told.said == ["in", "out"]
    assert [str(error) for error in told.errors] == ["torch did not tell that it ended"]
    told.settle()
    assert told.said == ["in", "out"]


def test_calls_left_without_a_word_do_not_pile_up(told):
    function, kept = torch.compile(lambda x: x * 2, backend="eager"), []
    told.open()
    for _ in range(20):
        unbegun(function, kept)
        kept.clear()  # its frames are gone, and others have their numbers
    assert len(told._calls) < 5
    assert told.said.count("in") == 20
    assert told.said.count("out") == 20 - len(told._calls)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_calls_that_run_are_left_alone_meanwhile(told, elsewhere):
    @torch.compiler.disable
    def look():
        if elsewhere:
            inside.set()
            go_on.wait(60)
        else:
            told.settle()
            seen.append(list(told.said))

    inside, go_on, seen = threading.Event(), threading.Event(), []
    function = torch.compile(lambda x: (look(), x * 2)[1], backend="eager")
    told.open()
    thread = threading.Thread(target=function, args=(torch.ones(3),))
    thread.start()
    if elsewhere:
        assert inside.wait(60)
        told.settle()
        seen.append(list(told.said))
        go_on.set()
    thread.join()
    assert seen == [["in"]]
    assert told.said == ["in", "out"]


def test_a_torch_that_reads_no_hooks_is_left_alone(told, monkeypatch):
    monkeypatch.setattr(entries, "_HOOKS", "hooks_of_another_name")
    assert not told.open()


def test_a_class_of_torch_s_that_is_called_otherwise_by_now_is_read_anew(told, monkeypatch):
    assert told.open()
    with monkeypatch.context() as other:
        other.setattr(torch._dynamo.eval_frame._TorchDynamoContext, "__call__", lambda self, function: function)
        assert not told.open()
    assert told.open()
