"""The shortcut where several optimizers make each step, one after the other; such steps say what the long way says."""

import random
from threading import Thread
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import AROUND, Model, batch, compared, evaluated, nothing_is_compiled, run
from tests.session.test_shortcut import calls

from narrowgauge.compute.nn.scaling import clock
from narrowgauge.session.shortcut.shortcut import Shortcut

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

LAST = 24
ODD = [
    *("not the first", "not the last", "the first twice", "the last first", "evaluates between", "evaluates behind"),
    *("a rate", "a rate between", "backward between", "backward on the same between", "called between", "twice"),
    *("no number", "a closure", "another", "zeroes between", "zeroes", "nothing"),
]


class Descent(torch.optim.Optimizer):
    """Its step may raise, or do what ends the shortcut."""

    refuses = makes = False

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if self.refuses:
            raise RuntimeError("out of memory")
        if self.makes:
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def optimizers_of(model, rates, kind=torch.optim.SGD):
    parts = (model.up.parameters(), [model.down.weight], [model.down.bias])
    parts = *parts[: len(rates) - 1], [p for part in parts[len(rates) - 1 :] for p in part]
    return [kind(part, lr=rate) for part, rate in zip(parts, rates, strict=True)]


def training(rates, odd=(), zeroes="behind", sharp=False):
    """A program of 24 steps, of which some are `odd`."""
    odd = dict(odd)

    def program(losses):
        model = Model()
        made = optimizers_of(model, rates)
        spare = torch.optim.SGD(model.parameters(), lr=0.01)

        def backward(number, what=""):
            x = batch(number)
            y = model(x)
            if what == "no number":
                y.backward(torch.ones_like(y) / y.numel())
                return
            loss = F.mse_loss(y, x)
            loss.backward(retain_graph=True)
            losses.append(loss.item())
            return y

        for number in range(1, LAST + 1):
            what = odd.get(number, "")
            y = backward(number, what)
            if what == "twice":
                backward(number + 50)
            if sharp or what == "zeroes":
                for optimizer in made:
                    optimizer.zero_grad()
                y = backward(number)
            if what == "a rate":
                made[-1].param_groups[0]["lr"] *= 0.5
            order = {"the last first": made[::-1], "not the first": made[1:], "not the last": made[:-1]}.get(what, made)
            order = [] if what == "nothing" else [*order[:1], *order] if what == "the first twice" else order
            for at, optimizer in enumerate(order):
                if at == 1:
                    if what == "evaluates between":
                        losses.append(evaluated(model))
                    if what == "a rate between":
                        made[-1].param_groups[0]["lr"] *= 0.5
                    if what == "backward between":
                        backward(number + 50)
                    if what == "backward on the same between":
                        y.mean().backward()
                    if what == "called between":
                        model(batch(number))
                    if what == "another":
                        spare.step()
                    if what == "zeroes between":
                        made[0].zero_grad()
                if what == "a closure" and at == 0:
                    optimizer.step(lambda number=number: backward(number + 70))
                else:
                    optimizer.step()
                if zeroes == "each":
                    optimizer.zero_grad()
            if zeroes == "behind" or what:
                for optimizer in made:
                    optimizer.zero_grad()
            if what == "evaluates behind":
                losses.append(evaluated(model))

    return program


def short_and_long(tmp_path, program):
    """Both are looked at in `compared`; here beside a program that never takes the shortcut."""
    wanted, session, writer = run(tmp_path, program, "loss")
    with patch.object(Shortcut, "take", lambda *_: None):
        found, long, other = run(tmp_path, program, "loss")
    assert found == wanted
    for name in ("loss", "lr", "lr_0", "lr_1", "lr_2", "lr_3", "lr_15", "lr_16", "eval_loss", "turn"):
        assert writer.column(name) == other.column(name), name
    assert session.updates.ended == long.updates.ended
    assert session.facts()["notes"] == long.facts()["notes"]
    assert session.facts()["steps"] == long.facts()["steps"]


@pytest.mark.parametrize("seed", range(60))
def test_by_chance(tmp_path, seed):
    chance = random.Random(seed)
    rates = chance.choice([(0.01, 0.01), (0.01, 0.02), (0.01, 0.02, 0.01)])
    odd = {at: chance.choice(ODD) for at in chance.sample(range(4, LAST + 1), 3)}
    short_and_long(tmp_path, training(rates, odd, chance.choice(["behind", "each"]), chance.random() < 0.2))


@pytest.mark.parametrize("odd", ODD)
def test_a_step_that_is_otherwise(tmp_path, odd):
    short_and_long(tmp_path, training((0.01, 0.02), {6: odd, 14: odd}))


@pytest.mark.parametrize("sharp", [False, True])
@pytest.mark.parametrize("zeroes", ["behind", "each"])
@pytest.mark.parametrize("rates", [(0.01, 0.01), (0.01, 0.02), (0.01, 0.02, 0.01)])
def test_it_is_taken(tmp_path, rates, zeroes, sharp):
    program, made, hands_over = training(rates, (), zeroes, sharp), [], Shortcut._hand_over
    compared(tmp_path, program)

    def counted(self):
        made.append(self._now.made)
        hands_over(self)

    before = clock._optimizer_steps
    with patch.object(Shortcut, "_hand_over", counted):
        run(tmp_path, program, "loss")
    assert sum(made) >= LAST - len(AROUND) - 3
    assert clock._optimizer_steps - before == LAST * len(rates)


def test_a_step_takes_few_functions(tmp_path):
    found = []

    def program(losses):
        model = Model()
        made = optimizers_of(model, (0.01, 0.02))

        def step():
            F.mse_loss(model(batch(1)), batch(1)).backward()
            for optimizer in made:
                optimizer.step()
            for optimizer in made:
                optimizer.zero_grad()

        for _ in range(9):
            found.append(calls(step))

    run(tmp_path, program, "loss", every=1000)
    assert len(found[-1]) <= 20 < len(found[0]), found[-1]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("what", ["refuses", "makes"])
def test_a_step_that_is_otherwise_in_its_midst(tmp_path, at, what):
    def program(losses):
        model = Model()
        made = optimizers_of(model, (0.01, 0.02), Descent)
        for number in range(1, LAST + 1):
            loss = F.mse_loss(model(batch(number)), batch(number))
            loss.backward()
            losses.append(loss.item())
            setattr(made[at], what, number == 14)
            try:
                for optimizer in made:
                    optimizer.step()
            except RuntimeError:
                losses.append(-1.0)
            for optimizer in made:
                optimizer.zero_grad()

    short_and_long(tmp_path, program)


def test_a_backward_behind_a_part_of_the_step(tmp_path):
    def program(losses):
        model = Model()
        made = optimizers_of(model, (0.01, 0.02))
        for number in range(1, LAST + 1):
            y = model(batch(number))
            for loss in (F.mse_loss(y, batch(number)), y.square().mean()):
                loss.backward(retain_graph=True)
                losses.append(loss.item())
                if number == 14 and len(losses) % 2:
                    made[0].step()
            for optimizer in made:
                optimizer.step()
            for optimizer in made:
                optimizer.zero_grad()

    short_and_long(tmp_path, program)


@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("rates", [(0.01,), (0.01, 0.02)])
def test_what_steps_in_another_thread_for_once_is_told(tmp_path, rates, of):
    def program(losses):
        model = Model()
        made = optimizers_of(model, rates)
        for number in range(1, LAST + 1):
            loss = F.mse_loss(model(batch(number)), batch(number))
            loss.backward()
            losses.append(loss.item())
            for at, optimizer in enumerate(made):
                if number == 14 and at in of:
                    thread = Thread(target=optimizer.step)
                    thread.start()
                    thread.join()
                else:
                    optimizer.step()
            for optimizer in made:
                optimizer.zero_grad()

    short_and_long(tmp_path, program)
