"""What a process was prepared with waits until it is trained, and nothing of ours is left then."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from narrowgauge.session.process.preparing import Prepared, preparing


def test_it_begins_once_with_what_is_called_and_puts_torch_back():
    told = []
    call, backward = nn.Module.__call__, torch.autograd.backward
    prepared = Prepared(told.append)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared.keep(optimizer)
    other(torch.ones(1, 2))
    nn.ReLU()(torch.ones(1, 2))
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert told == []
    assert nn.Module.__call__ is not call
    loss = model(torch.ones(1, 2)).sum()
    assert told == [[optimizer]]
    assert (nn.Module.__call__, torch.autograd.backward) == (call, backward)
    loss.backward()
    assert len(told) == 1


def test_a_backward_pass_begins_it_and_is_heard_by_who_listens_then():
    backward, heard = torch.autograd.backward, []

    def listen(optimizers):
        heard.append(len(optimizers))
        inner = torch.autograd.backward
        torch.autograd.backward = lambda *args, **kwargs: (heard.append("backward"), inner(*args, **kwargs))[1]

    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    try:
        Prepared(listen).keep(optimizer)
        weight.sum().backward()
        assert heard == [1, "backward"]
        assert weight.grad.tolist() == [1.0, 1.0]
    finally:
        torch.autograd.backward = backward


def test_others_that_wrap_it_meanwhile_stay():
    call, backward, told = nn.Module.__call__, torch.autograd.backward, []
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    prepared = Prepared(told.append)
    try:
        prepared.keep(optimizer)
        inner = torch.autograd.backward

        def theirs(*args, **kwargs):
            told.append("theirs")
            return inner(*args, **kwargs)

        torch.autograd.backward = theirs
        weight.sum().backward()
        assert told == ["theirs", [optimizer]]
        assert torch.autograd.backward is theirs
        assert weight.grad.tolist() == [1.0, 1.0]
    finally:
        nn.Module.__call__, torch.autograd.backward = call, backward


def test_this_process_is_prepared():
    assert not preparing()


def test_an_optimizer_need_not_be_hashable():
    class Mine(torch.optim.SGD):
        def __eq__(self, other):
            return self is other

        __hash__ = None

    told, model = [], nn.Linear(2, 2)
    prepared, optimizer = Prepared(lambda found: told.extend(map(id, found))), Mine(model.parameters(), lr=0.1)
    prepared.keep(optimizer)
    model(torch.ones(1, 2))
    assert told == [id(optimizer)]


def test_a_step_of_gradients_that_nobody_saw_begins_it():
    told, weight = [], torch.ones(2, requires_grad=True)
    prepared, optimizer = Prepared(told.append), torch.optim.SGD([weight], lr=0.5)
    step = torch.optim.SGD.step
    prepared.keep(optimizer)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert told == [[optimizer]]
    assert torch.optim.SGD.step is step
    assert weight.tolist() == [0.5, 0.5]


def test_what_the_program_has_put_at_the_same_places_stays(monkeypatch):
    told, calls, model = [], [], nn.Linear(2, 2)
    call, prepared = nn.Module.__call__, Prepared(told.append)
    monkeypatch.setattr(nn.Module, "__call__", lambda *args: (calls.append("call"), call(*args))[1])
    prepared.keep(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared.keep(optimizer)
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert len(told) == 1
    assert calls == ["call", "call"]


def test_a_backward_that_is_put_back_later_does_not_call_itself():
    weight = torch.ones(2, requires_grad=True)
    prepared, optimizer = Prepared(lambda found: None), torch.optim.SGD([weight], lr=0.1)
    prepared.keep(optimizer)
    ours = torch.autograd.backward
    torch.autograd.backward = lambda *args, **kwargs: ours(*args, **kwargs)
    weight.sum().backward()
    before = ours.__wrapped__
    torch.autograd.backward = ours
    try:
        weight.sum().backward()
        assert weight.grad.tolist() == [2.0, 2.0]
    finally:
        torch.autograd.backward = before


def test_many_threads_begin_it_once():
    told, model = [], nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            prepared, optimizer = Prepared(told.append), torch.optim.SGD(model.parameters(), lr=0.1)
            prepared.keep(optimizer)
            with ThreadPoolExecutor(4) as threads:
                for done in [threads.submit(model, torch.ones(1, 4)) for _ in range(8)]:
                    done.result()
    finally:
        sys.setswitchinterval(before)
    assert len(told) == 30
