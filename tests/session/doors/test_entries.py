"""Calls of what torch has compiled are told, whoever compiled it and when, and nothing is compiled for that."""

import pytest
import torch
from torch import nn

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


def test_a_call_that_torch_refuses_when_it_has_returned_is_over(told):
    def changes(x):
        stances.append(torch.compiler.set_stance("default"))
        return x * 2

    stances = []
    function = torch.compile(changes, backend="eager", fullgraph=True)
    told.open()
    refused = False
    try:
        with torch.compiler.set_stance("force_eager"):
            function(torch.ones(3))
    except RuntimeError:  # torch 2.13 on; what is older says nothing
        refused = True
    finally:
        torch.compiler.set_stance("default")
    assert told.said == (["in"] if refused else ["in", "out"])
    told.settle()
    assert told.said == ["in", "out"]


def test_a_torch_that_reads_no_hooks_is_left_alone(told, monkeypatch):
    monkeypatch.setattr(entries, "_HOOKS", "hooks_of_another_name")
    entries._reading.cache_clear()
    try:
        assert not told.open()
    finally:
        entries._reading.cache_clear()
