"""The shortcut where one model is watched and others train beside it; what such steps say is as by the long way."""

import random
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import AROUND, batch, nothing_is_compiled, told
from tests.session.steps.test_brief_others import alternating, before_it, loss_of, sgd, sharp, watched, with_closures
from tests.session.test_shortcut import calls
from torch.utils.checkpoint import checkpoint

from narrowgauge.compute.nn.scaling import clock
from narrowgauge.session.shortcut.shortcut import Shortcut
from narrowgauge.session.steps.usual import Usual

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

ODD = [
    *("evaluates", "evaluates theirs", "raises", "no number", "both", "an optimizer", "zeroes theirs", "zeroes all"),
    *("twice", "their step again", "their part", "interrupts", "rate", "another of its own", "its part", "nests"),
    *("evaluates theirs behind", "evaluates behind"),
]


def all_told(session, writer):
    return told(session, writer), session.updates.ended, session.facts()["notes"]


def gan(losses, model, other):
    """Each is trained by what the other says."""
    own, others = sgd(model, other)
    for number in range(1, 25):
        made = model(batch(number))
        others.zero_grad()
        loss_of(other, made.detach(), losses).backward()
        others.step()
        own.zero_grad()
        loss_of(other, made, losses).backward()
        own.step()


def checkpointed(losses, model, other):
    """A backward of theirs calls another."""
    own, others = sgd(model, other)
    for number in range(1, 25):
        x = batch(number).requires_grad_()
        y = model(x)
        checkpoint(other, x, use_reentrant=True).square().mean().backward()
        others.step()
        others.zero_grad()
        loss = y.square().mean()
        loss.backward()
        losses.append(loss.item())
        own.step()
        own.zero_grad()


def refers(losses, model, other):
    own, others = sgd(model, other)
    for number in range(1, 25):
        x = batch(number)
        y = model(x)
        loss_of(other, x, losses).backward()
        others.step()
        others.zero_grad()
        y = model(x)
        with torch.no_grad():
            reference = model(x)
        loss = (y - reference + 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        own.step()
        own.zero_grad()


def by_chance(seed):
    chance = random.Random(seed)
    order, odd = chance.choice(["own first", "theirs first", "between", "amid"]), chance.sample(range(4, 25), 3)
    whats = [chance.choice(ODD) for _ in odd]

    def program(losses, model, other):
        own, others = sgd(model, other)
        (another,) = sgd(model)

        def trains(number, what):
            x = batch(number)
            if what == "their part":
                other.down(torch.ones(2, 32))
            loss = F.mse_loss(other(x), x) if what != "both" else F.mse_loss(other(model(x)), x)
            if what == "interrupts":  # amid a backward of theirs
                loss.register_hook(lambda gradient: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]) and None)
            if what == "nests":
                inner = other.up(torch.ones(2, 16)).mean()
                loss.register_hook(lambda gradient: inner.backward())
            if what == "no number":
                y = other(x)
                y.backward(torch.ones_like(y))
            loss.backward()
            if what == "raises":
                with pytest.raises(RuntimeError):
                    loss.backward()
            others.step()
            if what == "their step again":
                others.step()
            losses.append(loss.item())
            if what != "zeroes all":
                others.zero_grad()

        for number in range(1, 25):
            what = dict(zip(odd, whats, strict=True)).get(number, "")
            if order == "theirs first":
                trains(number, what)
            loss = loss_of(model, batch(number), losses)
            if order == "amid":
                trains(number, what)
            loss.backward()
            if what == "twice":
                loss_of(model, batch(number), losses).backward()
            if what in ("evaluates", "evaluates theirs"):
                with torch.no_grad():
                    losses.append(F.mse_loss((other if "theirs" in what else model)(batch(3)), batch(3)).item())
            if what == "an optimizer":
                torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
            if what == "rate":
                own.param_groups[0]["lr"] *= 0.5
            if order == "between":
                trains(number, what)
            if what.startswith("zeroes"):
                (others if "theirs" in what else other).zero_grad()
            if what == "its part":
                model.down(torch.ones(2, 32)).mean().backward()
            if what == "another of its own":
                another.step()
            own.step()
            own.zero_grad()
            if what.endswith("behind"):
                with torch.no_grad():
                    losses.append(F.mse_loss((other if "theirs" in what else model)(batch(3)), batch(3)).item())
            if order == "own first":
                trains(number, what)

    return program


def compared(tmp_path, program):
    wanted, _, every = watched(tmp_path, program, "all")
    found, session, writer = watched(tmp_path, program, "loss")
    assert found == wanted
    with patch.object(Shortcut, "take", lambda *_: None):
        _, *long = watched(tmp_path, program, "loss")
    with patch.multiple(Usual, begun=lambda *_: None, made=lambda *_: False):
        _, *looked = watched(tmp_path, program, "loss")
    assert all_told(session, writer) == all_told(*long) == all_told(*looked)
    for name in ("loss", "lr", "eval_loss"):
        there = writer.column(name)
        assert there == {at: every.column(name)[at] for at in there}, name


@pytest.mark.parametrize("seed", range(40))
def test_by_chance(tmp_path, seed):
    compared(tmp_path, by_chance(seed))


@pytest.mark.parametrize("program", [gan, alternating, before_it, with_closures, sharp, checkpointed, refers])
def test_it_is_taken_and_says_what_the_long_way_says(tmp_path, program):
    compared(tmp_path, program)
    made, hands_over = [], Shortcut._hand_over

    def counted(self):
        made.append(self._now.made)
        hands_over(self)

    with patch.object(Shortcut, "_hand_over", counted):
        watched(tmp_path, program, "loss")
    assert sum(made) >= 24 - len(AROUND) - 4


def test_a_step_takes_few_functions(tmp_path):
    found = []

    def program(losses, model, other):
        own, others = sgd(model, other)

        def both():
            for each, optimizer in ((model, own), (other, others)):
                loss_of(each, batch(4), losses).backward()
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(8):
            found.append(calls(both))

    watched(tmp_path, program, "loss")
    assert len(found[-1]) <= 50 < len(found[0]), found[-1]


def test_their_steps_are_counted_as_ever(tmp_path):
    def counted():
        before = clock._optimizer_steps
        watched(tmp_path, alternating, "loss")
        return clock._optimizer_steps - before

    found = counted()
    with patch.object(Shortcut, "take", lambda *_: None):
        assert counted() == found
