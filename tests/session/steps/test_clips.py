"""The gradients' norm is of all that steps, whatever part of it a program clips, and however often."""

import copy
import math
import pickle
import sys
from types import ModuleType

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.nn.utils import clip_grad_norm_

from narrowgauge.session.steps.clips import Clips


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


def test_what_clips_can_be_pickled(tmp_path):
    with followed(tmp_path):
        for function in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_, torch.nn.utils.get_total_norm):
            assert pickle.loads(pickle.dumps(function)) is function


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


@pytest.mark.parametrize("part", [slice(2, 3), slice(None)])
def test_a_clip_between_two_optimizers(tmp_path, part):
    """Of what the second one holds; or of all, though the first has stepped with gradients as they were."""
    with followed(tmp_path) as (_, writer):
        net = model()
        first, second = torch.optim.SGD(net[:2].parameters(), lr=0.1), torch.optim.SGD(net[2].parameters(), lr=0.1)
        net(torch.randn(4, 8)).square().sum().backward()
        wanted = norm(net)
        first.step()
        clip_grad_norm_(net[part].parameters(), 0.01)
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


def test_a_part_of_which_some_is_frozen(tmp_path):
    def optimizers(net):
        net[0].bias.requires_grad_(False)
        return [torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)]

    with followed(tmp_path) as (_, writer):
        net = model()
        (optimizer,) = optimizers(net)
        net(torch.randn(4, 8)).square().sum().backward()
        wanted = math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None))
        clip_grad_norm_(net[0].parameters(), 0.01)
        optimizer.step()
    assert list(writer.column("grad_norm").values()) == pytest.approx([wanted], rel=1e-6)


def by_one_norm(net, *groups):
    total = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, 0.01, total)


def test_one_norm_by_which_several_groups_are_clipped(tmp_path):
    found, wanted = train(tmp_path, lambda net: by_one_norm(net, net[0].parameters(), [*net[1:].parameters()]))
    assert found == pytest.approx(wanted, rel=1e-6)
    found, wanted = train(tmp_path, lambda net: by_one_norm(net, [*net[0].parameters()], [*net[1:].parameters()]))
    assert found == pytest.approx(wanted, rel=1e-6)


def test_what_can_be_read_but_once(tmp_path):
    found, wanted = train(tmp_path, lambda net: by_one_norm(net, filter(lambda p: True, net.parameters())))
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("part", [slice(None), slice(0, 1)])
def test_a_clip_after_each_backward(tmp_path, part):
    with followed(tmp_path) as (_, writer):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for microbatch in range(3):
            net(torch.randn(4, 8)).square().sum().backward()
            wanted = norm(net)
            clip_grad_norm_(net[part].parameters(), 1e9 if microbatch < 2 else 0.01)
        optimizer.step()
    assert list(writer.column("grad_norm").values()) == pytest.approx([wanted], rel=1e-6)


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("clipped", [3, 6])
def test_optimizers_that_step_in_backward(tmp_path, every, clipped):
    """A step that is recorded has the norm of all; another one has it if all was clipped, or none."""
    with followed(tmp_path, every=every) as (_, writer):
        net = model()
        wanted, parameters = [], list(net.parameters())
        for number, p in enumerate(parameters):
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(p, optimizer=optimizer, clips=number < clipped):
                wanted.append(float(p.grad.double().square().sum()))
                if clips:
                    clip_grad_norm_(p, 0.01)
                optimizer.step()
                p.grad = None

            p.register_post_accumulate_grad_hook(step)
        net(torch.randn(4, 8)).square().sum().backward()
    found = list(writer.column("grad_norm").values())
    assert found == (pytest.approx([math.sqrt(sum(wanted))], rel=1e-6) if every == 1 or clipped == 6 else [])


def test_many_clips_are_not_gone_through_for_each_other():
    clips = Clips()
    for number in range(20_000):
        clips.add(torch.tensor(float(number)), frozenset((number,)))
    line = Clips()
    line.join(clips)
    assert line
    assert not clips
    assert set(line.norms([])) == {"grad_norm"}


def test_what_was_clipped_is_not_asked_for_its_gradients():
    class Parameter:
        """Of thousands this takes long."""

        def __init__(self, grad=None):
            self.asked, self._grad = 0, grad

        @property
        def grad(self):
            self.asked += 1
            return self._grad

    clipped, others = [Parameter(1.0) for _ in range(3)], [Parameter(1.0), Parameter()]
    clips = Clips()
    clips.add(torch.tensor(1.0), frozenset(map(id, clipped)))
    assert clips.left_out(clipped, tuple) == []
    assert clips.left_out([*others, *clipped], lambda: clipped) == others[:1]
    assert clips.left_out([*others, *clipped], tuple) == []  # what was clipped is none of what is trained
    assert [p.asked for p in clipped] == [0, 0, 0]


def test_functions_that_the_program_took_by_name_before(tmp_path, monkeypatch):
    program = ModuleType("program")
    program.total, program.clip = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setitem(sys.modules, "program", program)

    def clip(net):
        program.clip(net.parameters(), 0.01, program.total([p.grad for p in net.parameters()]))

    found, wanted = train(tmp_path, clip)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert program.clip is torch.nn.utils.clip_grads_with_norm_
