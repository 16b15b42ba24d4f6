"""The gradients' norm is of all that steps, whatever part of it a program clips, and however often."""

import copy
import math

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.nn.utils import clip_grad_norm_


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def norm(*modules):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for m in modules for p in m.parameters()))


def train(tmp_path, clip, optimizers=lambda net: [torch.optim.SGD(net.parameters(), lr=0.1)], steps=2):
    """What a session wrote as the norm of each step, and what it was before anything was clipped."""
    wanted = []
    with followed(tmp_path) as (session, writer):
        net = model()
        chosen = optimizers(net)
        for _ in range(steps):
            net(torch.randn(4, 8)).square().sum().backward()
            wanted.append(norm(net))
            clip(net)
            for optimizer in chosen:
                optimizer.step()
            net.zero_grad()
    assert session.hearing.notes == []
    return list(writer.column("grad_norm").values()), wanted


def some(net):
    clip_grad_norm_(net[0].parameters(), 0.01)


def two(net):
    clip_grad_norm_(net[0].parameters(), 0.01)
    clip_grad_norm_([*net[1].parameters(), *net[2].parameters()], 0.01)


def one(net):
    clip_grad_norm_(net[1].weight, 0.01)


def twice(net):
    clip_grad_norm_(net.parameters(), 0.01)
    clip_grad_norm_(net.parameters(), 0.005)


def a_part_of_it_again(net):
    clip_grad_norm_(net.parameters(), 0.01)
    clip_grad_norm_(net[0].parameters(), 0.005)


@pytest.mark.parametrize("clip", [some, two, one, twice, a_part_of_it_again])
@pytest.mark.parametrize("number", [1, 2])
def test_the_norm_is_of_all_that_steps(tmp_path, clip, number):
    def optimizers(net):
        if number == 1:
            return [torch.optim.SGD(net.parameters(), lr=0.1)]
        return [torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.AdamW(net[1:].parameters())]

    found, wanted = train(tmp_path, clip, optimizers)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_a_clip_between_two_optimizers(tmp_path):
    with followed(tmp_path) as (_, writer):
        net = model()
        first, second = torch.optim.SGD(net[:2].parameters(), lr=0.1), torch.optim.SGD(net[2].parameters(), lr=0.1)
        net(torch.randn(4, 8)).square().sum().backward()
        wanted = norm(net)
        first.step()
        clip_grad_norm_(net[2].parameters(), 0.01)
        second.step()
    assert list(writer.column("grad_norm").values()) == pytest.approx([wanted], rel=1e-6)


def test_a_clip_of_all_after_a_clip_of_a_part(tmp_path):
    def clip(net):
        clip_grad_norm_(net[0].parameters(), 1e9)  # leaves it as it is
        clip_grad_norm_(net.parameters(), 0.01)

    found, wanted = train(tmp_path, clip)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_what_is_clipped_may_be_no_optimizers(tmp_path):
    """Half-precision models with master copies that the program makes itself: their gradients are the same ones."""
    with followed(tmp_path) as (_, writer):
        net = model()
        masters = copy.deepcopy(net)
        optimizer = torch.optim.SGD([*masters.parameters()], lr=0.1)
        masters(torch.randn(4, 8)).square().sum().backward()
        for p, master in zip(net.parameters(), masters.parameters(), strict=True):
            p.grad = master.grad.clone()
        wanted = norm(net)
        clip_grad_norm_(net.parameters(), 1e9)
        optimizer.step()
    assert list(writer.column("grad_norm").values()) == pytest.approx([wanted], rel=1e-6)
