"""The shortcut where an optimizer calls a closure, once or to try something, and where losses are no numbers.

What such steps say is compared with steps that are looked at, as in `steps/test_usual.py`.
"""

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import AROUND, batch, compared, evaluated, made, nothing_is_compiled, run
from tests.session.test_shortcut import FEWEST, calls, ours, resting

__all__ = ["nothing_is_compiled", "resting"]  # fixtures


def by_closure(model, optimizer, number, losses, times=1, amid=lambda call: None):
    """A step whose closure is called so many times."""
    found = []

    def evaluate():
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch(number)), batch(number))
        found.append(loss.item())
        amid(len(found))
        loss.backward()
        return loss

    def tries(_, args, kwargs):
        for _ in range(times - 1):
            args[1]()

    hook = optimizer.register_step_pre_hook(tries)
    try:
        optimizer.step(evaluate)
    finally:
        hook.remove()
        losses.append(found[0])
    optimizer.zero_grad()


def test_a_closure_takes_few_functions(resting):
    _, _, model, optimizer, _ = resting
    found = min((calls(lambda: by_closure(model, optimizer, 4, [])) for _ in range(3)), key=len)
    assert "around_step.<locals>.evaluate" in found
    assert len(found) <= FEWEST + 6, found


def test_a_closure_that_is_called_again_leaves_it(resting):
    session, writer, model, optimizer, before = resting
    losses = []
    for number in (4, 5, 6):
        by_closure(model, optimizer, number, losses, times=3 if number == 5 else 1)
        assert ours() != before
    session.finish()
    assert list(writer.column("loss").values())[3:] == losses
    assert list(writer.column("grad_norm")) == [1, 2]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("at", [4, 9, 14, 19, 20])
def test_a_closure_that_raises_and_is_called_once_more(tmp_path, at, times):
    def program(losses):
        model, optimizer = made()

        def fails(call):
            raised.append(call)
            if call == times and len(raised) == times:
                raise RuntimeError("out of memory")

        for number in range(1, 25):
            raised = []
            try:
                by_closure(model, optimizer, number, losses, times, *[fails] * (number == at))
            except RuntimeError:
                optimizer.param_groups[0]["lr"] *= 0.5
                by_closure(model, optimizer, number, losses, times, fails)

    compared(tmp_path, program)
    _, _, every = run(tmp_path, program, "all")
    _, _, brief = run(tmp_path, program, "loss")
    for name in ("loss", "lr"):
        assert brief.column(name) == every.column(name)


def test_it_is_known_of_a_closure_that_runs_as_it_is_left(resting):
    session, _, model, optimizer, _ = resting
    known = []

    def leaves(call):
        session.steps.usual.interrupted()
        known.append(session.updates.in_closure)

    by_closure(model, optimizer, 4, [], 1, leaves)
    assert known == [True]
    assert not session.updates.in_closure


def test_an_evaluation_in_a_closure_ends_it(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            looks = [lambda call: losses.append(evaluated(model))] * (number in (5, 14))
            by_closure(model, optimizer, number, losses, 1, *looks)

    compared(tmp_path, program)
    wanted, _, every = run(tmp_path, program, "all")
    losses, _, brief = run(tmp_path, program, "loss")
    assert losses == wanted
    assert brief.column("loss") == every.column("loss")


class Lbfgs:
    """A program whose optimizer tries something three times a step; what its closure does `amid` is otherwise."""

    def __init__(self, amid=lambda *_: None):
        self.amid = amid

    def __call__(self, losses):
        model, _ = made()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        for number in range(1, 25):
            x, called = batch(number), []

            def closure(x=x, number=number, called=called):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), x)
                called.append(loss.item())
                self.amid(number, len(called), model, optimizer, losses)
                loss.backward()
                return loss

            try:
                optimizer.step(closure)
            except RuntimeError:
                losses.append(-1.0)
            losses.append(called[0])
            optimizer.zero_grad()


def test_what_an_optimizer_tries_takes_few_functions(tmp_path):
    found = []

    def program(losses):
        model, _ = made()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch(1)), batch(1))
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(12):
            found.append(calls(lambda: optimizer.step(closure)))

    run(tmp_path, program, "loss", every=1000)
    assert found[-1].count("around_step.<locals>.evaluate") == 3
    assert "CallsAlone.passes" not in found[-1]
    assert len(found[-1]) <= FEWEST + 34 < len(found[0])


def raises(number, call, *_):
    if number == 14 and call == 2:
        raise RuntimeError("out of memory")


def raises_at_first(number, call, *_):
    if number == 14 and call == 1:
        raise RuntimeError("out of memory")


def evaluates(number, call, model, optimizer, losses):
    if number in (5, 14) and call == 2:
        losses.append(evaluated(model))


def evaluates_at_first(number, call, model, optimizer, losses):
    if number in (5, 14) and call == 1:
        losses.append(evaluated(model))


def sets_its_rate(number, call, model, optimizer, losses):
    optimizer.param_groups[0]["lr"] = 0.1 / (number + call)


def tries_less(number, call, model, optimizer, losses):
    optimizer.param_groups[0]["max_iter"] = 1 + number % 4


def has_a_backward_more(number, call, model, optimizer, losses):
    if number == 14 and call == 2:
        (model(batch(40)).square().mean() * 0.5).backward()


def is_called_on_more(number, call, model, optimizer, losses):
    if number % 2 and call > 1:
        losses.append(model(batch(41)).sum().item())


def hands_on(number, call, model, optimizer, losses):
    if call == 3:
        y = model(batch(42))
        y.backward(torch.ones_like(y))


def makes_an_optimizer(number, call, model, optimizer, losses):
    if number == 14 and call == 2:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])


def looks_at_its_gradients(number, call, model, optimizer, losses):
    if number == 14 and call == 2:
        with torch.no_grad():
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())


@pytest.mark.parametrize(
    "amid",
    [
        *(raises, raises_at_first, evaluates, evaluates_at_first, sets_its_rate, tries_less, has_a_backward_more),
        *(is_called_on_more, hands_on, makes_an_optimizer, looks_at_its_gradients),
    ],
)
def test_what_is_otherwise_in_what_an_optimizer_tries(tmp_path, amid):
    compared(tmp_path, Lbfgs(amid), steps=23 if amid in (raises, raises_at_first) else 24)


def test_what_an_optimizer_tries_is_left_in_the_midst(tmp_path):
    """Gradients are set to zero behind the backward of its closure's first call."""

    def program(losses):
        model, _ = made()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        for number in range(1, 25):
            x = batch(number)

            def closure(x=x, number=number):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), x)
                loss.backward()
                losses.append(loss.item())
                if number == 14:
                    optimizer.zero_grad()
                return loss

            optimizer.step(closure)

    compared(tmp_path, program)


class HandsOn:
    """A program that calls backward on no number, and on so many numbers beside it, of which one has an odd step."""

    def __init__(self, numbers, odd=lambda *_: None):
        self.numbers, self.odd = numbers, odd

    def __call__(self, losses):
        model, optimizer = made()
        for number in range(1, 25):
            x = batch(number)
            for _ in range(self.numbers):
                loss = F.mse_loss(model(x), x)
                loss.backward()
                losses.append(loss.item())
            y = model(x)
            y.backward(2 * (y.detach() - x) / x.numel())
            losses.append(y.sum().item())
            if number == 14:
                self.odd(model, x)
            optimizer.step()
            optimizer.zero_grad()


def another_vector(model, x):
    y = model(x)
    y.backward(torch.ones_like(y))


def another_number(model, x):
    F.mse_loss(model(x), x).backward()


def another_loss(model, x):
    losses = F.mse_loss(model(x), x, reduction="none").mean(-1)
    torch.autograd.backward([*losses])


@pytest.mark.parametrize("odd", [lambda *_: None, another_vector, another_number, another_loss])
@pytest.mark.parametrize("numbers", [0, 1, 2])
def test_backward_on_no_number(tmp_path, numbers, odd):
    compared(tmp_path, HandsOn(numbers, odd))


@pytest.mark.parametrize("numbers", [0, 1])
def test_backward_on_no_number_takes_few_functions(tmp_path, numbers):
    found, program = [], HandsOn(numbers)

    def counted(losses):
        found.append(calls(lambda: program(losses)))

    session = run(tmp_path, counted, "loss", every=1000)[1]
    assert session.steps.rest.steps >= 24 - len(AROUND)
    assert found[0].count("in_place_of.<locals>.backward") >= (1 + numbers) * 20
