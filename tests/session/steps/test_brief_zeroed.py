"""Brief rows of programs that set gradients to zero between two of backward's calls in each step."""

import functools

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import Refused, batch, made, nothing_is_compiled, run
from tests.session.steps.test_brief import BETWEEN, EACH, IN_BRIEF, with_rows_of_each

__all__ = ["nothing_is_compiled"]  # a fixture for each test here, too


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware, as most have it: around another optimizer, with two steps, or a closure for the second pass."""

    def __init__(self, parameters, rho=0.05, twice=False):
        super().__init__(parameters, {"rho": rho, "lr": 0.01})
        self.base, self.twice = torch.optim.SGD(self.param_groups, lr=0.01), twice
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        if self.twice:
            closure()
        self.first_step()
        closure()
        self.second_step()


def backward(model, x, losses, y=None):
    loss = F.mse_loss(model(x), x if y is None else y)
    loss.backward()
    losses.append(loss.item())


def two_steps(model, x, losses, sharp):
    backward(model, x, losses)
    sharp.first_step()
    backward(model, x, losses)
    sharp.second_step()


def closure(model, x, losses, sharp):
    def again():
        sharp.zero_grad()
        backward(model, x, losses)

    if not sharp.twice:
        backward(model, x, losses)
    sharp.step(again)
    sharp.zero_grad()


def adversarial(model, x, losses, optimizer, attacks=1, owner=None):
    moved = x
    for _ in range(attacks):
        moved = moved.detach().clone().requires_grad_()
        backward(model, moved, losses, x)
        moved = moved + 0.1 * moved.grad.sign()
        (owner or optimizer).zero_grad()
    backward(model, moved.detach(), losses, x)
    optimizer.step()
    optimizer.zero_grad()


def late(model, x, losses, optimizer):
    """Gradients are set to zero between a model's call and backward; these are others' of the first batch."""
    backward(model, x, losses)
    z = x.clone()
    loss = F.mse_loss(model(z), z)
    optimizer.zero_grad()
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()


def attacked_harder(model, x, losses, optimizer):
    adversarial(model, x, losses, optimizer, attacks=3, owner=model)


def two_losses(model, x, losses, optimizer):
    y, kept = model(x), []
    for loss in (F.mse_loss(y, x), (y - 1).abs().mean()):
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        losses.append(loss.item())
        kept.append([p.grad.clone() for p in model.parameters()])
    for p, *grads in zip(model.parameters(), *kept, strict=True):
        p.grad = sum(grads)
    optimizer.step()
    optimizer.zero_grad()


def in_one_closure(model, x, losses, optimizer):
    """The first of two calls is thrown away in the closure that is given to the optimizer, before the second."""

    def both():
        moved = x.clone().requires_grad_()
        backward(model, moved, losses, x)
        optimizer.zero_grad()
        backward(model, (moved + 0.1 * moved.grad.sign()).detach(), losses, x)

    optimizer.step(both)
    optimizer.zero_grad()


def in_backward(model, x, losses, optimizer):
    """Gradients are set to zero inside a backward pass, before the step's second."""
    loss = F.mse_loss(model(x), x)
    loss.register_hook(lambda gradient: optimizer.zero_grad())
    loss.backward()
    losses.append(loss.item())
    backward(model, batch(len(x)), losses)
    optimizer.step()
    optimizer.zero_grad()


def training(steps, twice=None, kind=torch.optim.AdamW):
    """A program of 24 of these steps; `losses` are one list for each."""

    def program(losses):
        model, optimizer = made(kind)
        if twice is not None:
            optimizer = Sharp(model.parameters(), twice=twice)
        for number in EACH:
            losses.append([])
            steps(model, batch(number), losses[-1], optimizer)

    return program


PROGRAMS = [
    pytest.param(training(two_steps, False), sum, id="two steps"),
    pytest.param(training(closure, False), sum, id="closure"),
    pytest.param(training(closure, True), lambda losses: losses[0], id="closure twice"),
    pytest.param(training(adversarial), lambda losses: losses[-1], id="adversarial"),
    pytest.param(training(attacked_harder), lambda losses: losses[-1], id="attacked harder"),
    pytest.param(training(late), lambda losses: losses[-1], id="late"),
    pytest.param(training(two_losses), sum, id="two losses"),
    pytest.param(training(in_one_closure), sum, id="in one closure"),
    pytest.param(training(in_backward), sum, id="in backward"),
]


@pytest.mark.parametrize(("program", "wanted"), PROGRAMS)
def test_where_gradients_are_set_to_zero_in_each_step_a_brief_row_has_the_loss_of_a_whole_one(
    tmp_path, program, wanted
):
    session, writer = with_rows_of_each(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)
    assert all(set(writer.scalars[at]) == IN_BRIEF for at in BETWEEN)
    losses = []
    program(losses)
    assert list(writer.column("loss").values()) == pytest.approx(list(map(wanted, losses)))


@pytest.mark.parametrize(("program", "wanted"), PROGRAMS)
def test_how_many_microbatches_were_thrown_away_is_known_of_brief_rows_as_well(tmp_path, program, wanted):
    told = [run(tmp_path, program, scalars)[1].facts()["notes"] for scalars in ("all", "loss")]
    assert told[0] == told[1]


@pytest.mark.parametrize("at", [14, 20])
def test_data_that_are_others_in_one_step_are_others_there(tmp_path, at):
    """The second look is at another batch; or of a program that has others always it is at the same."""
    for other in (False, True):

        def program(losses, other=other):
            model, optimizer = made()
            for number in EACH:
                x = batch(number)
                backward(model, x, losses)
                optimizer.zero_grad()
                backward(model, batch(number) if other is not (number == at) else x, losses)
                optimizer.step()
                optimizer.zero_grad()

        session, writer = with_rows_of_each(tmp_path, program)
        assert list(writer.column("loss")) == EACH
        assert session.steps.rest.steps == len(BETWEEN)


@pytest.mark.parametrize("kept", ["n", "nn", "nv", "vn", "v"])
@pytest.mark.parametrize("thrown", ["n", "v", "vn"])
def test_calls_on_no_number_are_thrown_away_as_those_on_losses_are(tmp_path, thrown, kept):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            for kind in (*thrown, "zero", *kept):
                if kind == "zero":
                    optimizer.zero_grad()
                    number += 100
                    continue
                y = model(batch(number))
                if kind == "v":
                    y.backward(y.detach())
                else:
                    F.mse_loss(y, batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()

    session, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == (EACH if "n" in kept else [])
    assert session.steps.rest.steps == len(BETWEEN)


def test_of_another_number_of_calls_than_before_the_next_row_is_whole(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            adversarial(model, batch(number), losses, optimizer, attacks=2 if number == 14 else 1)

    _, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == EACH
    assert [at for at in BETWEEN if at in writer.column("grad_norm")] == [15]


def test_some_gradients_that_are_left_are_those_of_the_step(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            backward(model, batch(number), losses)
            model.up.zero_grad()
            backward(model, batch(number + 50), losses)
            optimizer.step()
            optimizer.zero_grad()

    session, _ = with_rows_of_each(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)


@pytest.mark.parametrize("behind", [True, False])
def test_a_loss_that_is_no_number_or_a_backward_that_raises_is_thrown_away_with_the_others(tmp_path, behind):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            x = batch(number)
            y = model(x)
            if number == 14 and not behind:
                y.backward(torch.ones_like(y))
            elif number == 17 and not behind:
                with pytest.raises(RuntimeError, match="out of memory"):
                    Refused.apply(F.mse_loss(y, x)).backward()
            else:
                F.mse_loss(y, x).backward()
            optimizer.zero_grad()
            x = batch(number + 50)
            y = model(x)
            if number == 14 and behind:
                y.backward(torch.ones_like(y))
            else:
                F.mse_loss(y, x).backward()
            optimizer.step()
            optimizer.zero_grad()

    with_rows_of_each(tmp_path, program)


def test_a_closure_that_was_interrupted_leaves_nothing_in_the_next_step(tmp_path):
    class Interrupted(Sharp):
        stops = False

        @torch.no_grad()
        def first_step(self):
            if self.stops:
                raise KeyboardInterrupt
            super().first_step()

    def program(losses):
        model, _ = made()
        optimizer = Interrupted(model.parameters(), twice=True)
        for number in EACH:
            if number == 14:
                optimizer.stops = True
                with pytest.raises(KeyboardInterrupt):
                    closure(model, batch(99), losses, optimizer)
                optimizer.stops = False
            optimizer.param_groups[0]["lr"] = 0.01 / number
            closure(model, batch(number), losses, optimizer)

    _, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == EACH


def test_rates_are_those_of_a_closure_s_first_call(tmp_path):
    def program(losses):
        model, _ = made()
        optimizer = Sharp(model.parameters(), twice=True)

        def again(x):
            optimizer.param_groups[0]["lr"] *= 0.9
            backward(model, x, losses)

        for number in EACH:
            optimizer.step(functools.partial(again, batch(number)))

    with_rows_of_each(tmp_path, program)


def test_a_scaler_is_beside_it(tmp_path):
    def program(losses):
        model, optimizer = made()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in EACH:
            for part in (0, 1):
                x = batch(number + 50 * part)
                scaler.scale(F.mse_loss(model(x), x)).backward()
                if not part:
                    optimizer.zero_grad()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    session, writer = with_rows_of_each(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)
    assert list(writer.column("loss")) == EACH


def test_models_that_are_compiled_too(tmp_path):
    def program(losses):
        model, optimizer = made()
        compiled = torch.compile(model, backend="eager", dynamic=True)
        for number in EACH:
            adversarial(compiled, batch(number), losses, optimizer)

    session, _ = with_rows_of_each(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)


def test_what_was_set_to_zero_once_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.session.steps.cycle.WINDOW", 2)

    def program(losses):
        model, optimizer = made()
        for number in EACH:
            backward(model, batch(number), losses)
            if number == 1:
                optimizer.zero_grad()
                backward(model, batch(number), losses)
            optimizer.step()
            optimizer.zero_grad()

    session, _ = with_rows_of_each(tmp_path, program)
    assert not session.steps.resting.careful


def test_what_is_set_to_zero_now_and_then_costs_one_loss(tmp_path):
    """Of the first nobody had looked at what models were given; how many microbatches it was is not known, either."""

    def program(losses):
        model, optimizer = made()
        for number in EACH:
            if number % 3 == 0:
                adversarial(model, batch(number), losses, optimizer)
            else:
                backward(model, batch(number), losses)
                optimizer.step()
                optimizer.zero_grad()

    session, writer = with_rows_of_each(tmp_path, program)
    assert [at for at in EACH if at not in writer.column("loss")] == [3]
    _, whole, _ = run(tmp_path, program, "all")
    for facts, told in ((whole.facts(), "Gradients of 8"), (session.facts(), "Gradients of at least 7")):
        assert [note for note in facts["notes"] if note.startswith(f"{told} microbatches were set to zero")]
