"""Programs left alone of which several optimizers make each step: one of matrices, say, and one of the rest."""

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import Model, batch, compared, evaluated, notes, nothing_is_compiled, run

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

EACH = range(1, 25)


def parts(model):
    """An optimizer for each of the model's two layers."""
    return [torch.optim.SGD(model.up.parameters(), lr=0.01), torch.optim.AdamW(model.down.parameters(), lr=0.005)]


def loss_of(model, number, losses, by=1):
    x = batch(number)
    loss = F.mse_loss(model(x), x) / by
    loss.backward()
    losses.append(loss.item())


def trained(between=lambda model, optimizers, number, losses: None, order=lambda number, optimizers: optimizers):
    """A program whose steps are made by what `order` says, with something `between` the first and the next."""

    def program(losses):
        model = Model()
        optimizers = parts(model)
        for number in EACH:
            for part in (0, 1):
                loss_of(model, 2 * number + part, losses, by=2)
            for at, optimizer in enumerate(order(number, optimizers)):
                optimizer.param_groups[0]["lr"] = 0.01 / (number + at)
                optimizer.step()
                if not at:
                    between(model, optimizers, number, losses)
            model.zero_grad()

    return program


def test_steps_of_two_are_left_alone(tmp_path):
    session, writer = compared(tmp_path, trained())
    assert session.steps.rest.steps == 16
    _, in_brief, writer = run(tmp_path, trained(), "loss")
    assert not notes(in_brief)
    assert in_brief.steps.rest.steps == 20
    assert set(writer.column("lr_1")) == set(EACH)
    assert not writer.column("turn")


def steps_evaluated(model, optimizers, number, losses):
    if number % 5 == 0:
        losses.append(evaluated(model))


def a_step_more(model, optimizers, number, losses):
    if number == 14:
        optimizers[0].step()


def begins_anew(model, optimizers, number, losses):
    if number == 14:
        loss_of(model, 77, losses)


def raises_in_between(model, optimizers, number, losses):
    if number == 14:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("between", "steps"), [(steps_evaluated, 24), (a_step_more, 25), (begins_anew, 25), (raises_in_between, 25)]
)
def test_what_comes_between_them(tmp_path, between, steps):
    session, _ = compared(tmp_path, trained(between), steps=steps)
    assert session.steps.rest.steps


def one_is_left_out(number, optimizers):
    return optimizers if number != 14 else optimizers[1:]


def the_last_is_left_out(number, optimizers):
    return optimizers if number != 14 else optimizers[:1]


def the_other_way_round(number, optimizers):
    return optimizers if number != 14 else optimizers[::-1]


def every_other_step(number, optimizers):
    return optimizers if number % 2 else optimizers[1:]


def every_third_the_last(number, optimizers):
    return optimizers if number % 3 == 0 else optimizers[:1]


ORDERS = [one_is_left_out, the_last_is_left_out, the_other_way_round, every_other_step, every_third_the_last]


@pytest.mark.parametrize("order", ORDERS)
def test_not_all_of_them_step(tmp_path, order):
    compared(tmp_path, trained(order=order), turns=True)


def test_a_third_one_joins(tmp_path):
    def program(losses):
        model, more = Model(), torch.nn.Linear(16, 16)
        optimizers = parts(model)
        for number in EACH:
            x = batch(number)
            loss = F.mse_loss(model(x), x) + more(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            if number == 14:
                optimizers.append(torch.optim.SGD(more.parameters(), lr=0.1))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    compared(tmp_path, program, turns=True)


def test_one_is_made_anew(tmp_path):
    def program(losses):
        model = Model()
        optimizers = parts(model)
        for number in EACH:
            loss_of(model, number, losses)
            if number == 14:
                optimizers = [optimizers[0], torch.optim.AdamW(model.down.parameters(), lr=0.3)]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    compared(tmp_path, program)


@pytest.mark.parametrize(("which", "steps"), [(0, 24), (1, 25)])
def test_rates_that_a_closure_of_one_sets_are_the_step_s(tmp_path, which, steps):
    def program(losses):
        model = Model()
        optimizers = parts(model)
        for number in EACH:
            x = batch(number)

            def closure(x=x, number=number):
                optimizers[which].param_groups[0]["lr"] = 0.01 / number
                model.zero_grad()
                loss = F.mse_loss(model(x), x)
                loss.backward()
                return loss

            for at, optimizer in enumerate(optimizers):
                if at == which:
                    losses.append(optimizer.step(closure).item())
                else:
                    optimizer.step()

    compared(tmp_path, program, turns=True, steps=steps)


@pytest.mark.parametrize("order", [lambda number, optimizers: optimizers, the_last_is_left_out])
@pytest.mark.parametrize("zeroed", ["behind its own step", "all, before the next"])
def test_gradients_that_one_has_stepped_by_are_not_thrown_away(tmp_path, order, zeroed):
    def program(losses):
        model = Model()
        optimizers = parts(model)
        for number in EACH:
            if zeroed == "all, before the next":
                model.zero_grad()
            loss_of(model, number, losses)
            for optimizer in order(number, optimizers):
                optimizer.step()
                if zeroed == "behind its own step":
                    optimizer.zero_grad()

    losses, session, writer = run(tmp_path, program, "loss")
    assert list(writer.column("loss").values()) == losses
    assert [at for at in EACH if "grad_norm" in writer.scalars[at]][:4] == [
        1,
        2,
        10,
        *([20] if order(14, "12") == "12" else [15]),
    ]
    assert session.steps.rest.steps >= 11
