"""What a process was prepared with waits until it is trained, and nothing of ours is left then."""

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
