"""Steps between the recorded ones of which a row has the loss, the learning rates and the time, and nothing else."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import (
    Functions,
    Model,
    Refused,
    assert_same_tensors,
    batch,
    evaluated,
    made,
    notes,
    nothing_is_compiled,
    plain,
    run,
    step,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from narrowgauge.session.steps import pace

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

EACH = list(range(1, 25))
WHOLE = [1, 2, 10, 20]
BETWEEN = [at for at in EACH if at not in WHOLE]
IN_BRIEF = {"loss", "lr", "step_seconds", "clean", "nonfinite"}


def with_rows_of_each(tmp_path, program, **more):
    """The session and the writer of a program in brief; all that it has is as if each step had a whole row."""
    wanted, _, every = run(tmp_path, program, "all", **more)
    losses, session, writer = run(tmp_path, program, "loss", **more)
    assert losses == wanted
    for name in ("loss", "lr", "lr_0", "lr_1", "grad_norm", "tokens", "eval_loss", "skipped", "nonfinite"):
        there = writer.column(name)
        assert there == {at: every.column(name)[at] for at in there}, name
    assert list(writer.column("lr")) == EACH
    assert_same_tensors(writer, every)
    return session, writer


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_between_recorded_steps_rows_are_brief(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    session, writer = with_rows_of_each(tmp_path, functools.partial(plain, device=device))
    assert list(writer.column("loss")) == EACH
    assert all(set(writer.scalars[at]) == IN_BRIEF for at in BETWEEN)
    assert all({"grad_norm", "tokens", "data_digest", "microbatches"} < set(writer.scalars[at]) for at in WHOLE)
    assert all(writer.scalars[at]["clean"] == 1.0 for at in BETWEEN if at - 1 not in WHOLE)
    assert session.facts()["watch"]["steps_in_brief"] == len(BETWEEN)
    assert not notes(session)


@pytest.mark.parametrize(("seconds", "settled", "brief"), [(1e9, 4, True), (0.0, 4, False), (1e9, 1000, False)])
def test_by_itself_that_is_so_where_steps_are_short(tmp_path, monkeypatch, seconds, settled, brief):
    monkeypatch.setattr(pace, "SHORT", seconds)
    monkeypatch.setattr(pace, "SETTLED", settled)
    monkeypatch.setattr("narrowgauge.session.steps.rows.TOGETHER", 1)  # times are known as steps end
    _, session, writer = run(tmp_path, plain, "auto")
    assert list(writer.column("loss")) == EACH
    assert session.steps.rest.steps == (len([at for at in BETWEEN if at > 5]) if brief else 0)
    assert ("steps_in_brief" in session.facts()["watch"]) is brief
    assert not notes(session)


def test_steps_of_many_parameters_are_longer_before_they_are_not_short(tmp_path, monkeypatch):
    """A whole row asks of each whether it was stepped."""
    monkeypatch.setattr(pace, "SHORT", 1e-9)
    monkeypatch.setattr(pace, "SETTLED", 4)
    monkeypatch.setattr("narrowgauge.session.steps.rows.TOGETHER", 1)
    for many, brief in ((1e-15, True), (1e15, False)):
        monkeypatch.setattr(pace, "MANY", many)
        _, session, _ = run(tmp_path, plain, "auto")
        assert (session.steps.rest.steps > 0) is brief


def test_steps_that_all_follow_an_evaluation_are_short_without_it(tmp_path, monkeypatch):
    """An agent looks at its model before each of its steps: no time between two of them is a step's alone."""
    monkeypatch.setattr(pace, "SETTLED", 4)
    monkeypatch.setattr("narrowgauge.session.steps.rows.TOGETHER", 1)

    def program(losses):
        model, optimizer = made()
        for _ in EACH:
            with torch.no_grad():
                model(torch.ones(1, 16))
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    losses, session, writer = run(tmp_path, program, "auto")
    assert list(writer.column("loss").values()) == losses
    assert sum(writer.column("clean").values()) <= 1
    assert session.steps.rest.steps >= len(BETWEEN) - 5


def test_a_program_that_goes_on_otherwise_has_whole_rows_and_nobody_is_told_who_did_not_ask(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "SETTLED", 3)
    monkeypatch.setattr("narrowgauge.session.steps.rows.TOGETHER", 1)

    def program(losses):
        model, optimizer = made()
        other = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in EACH:
            step(model, other if number == 14 else optimizer, number, losses)

    for scalars, told in (("auto", 0), ("loss", 1)):
        _, session, writer = run(tmp_path, program, scalars)
        assert list(writer.column("grad_norm"))[-9:] == EACH[-9:]
        assert 0 < session.steps.rest.steps <= len([at for at in BETWEEN if at <= 14])
        assert len(notes(session)) == told
    assert notes(session)[0].endswith("about step 15 was not as before: each step has a whole row since.")


def test_gradients_that_may_be_thrown_away_leave_a_step_without_a_loss(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            x = batch(number)
            for _ in range(2 if number == 14 else 1):
                optimizer.zero_grad()
                F.mse_loss(model(x), x).backward()
            optimizer.step()

    _, writer = with_rows_of_each(tmp_path, program)
    assert [at for at in EACH if at not in writer.column("loss")] == [14]
    assert 15 in writer.column("grad_norm")


def test_a_backward_that_raises_leaves_a_step_without_a_loss(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            if number == 14:
                with pytest.raises(RuntimeError, match="out of memory"):
                    Refused.apply(loss).backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    _, writer = with_rows_of_each(tmp_path, program)
    assert [at for at in EACH if at not in writer.column("loss")] == [14]


@pytest.mark.parametrize(
    "backward",
    [
        pytest.param(lambda loss: torch.autograd.backward([loss, 2 * loss]), id="several"),
        pytest.param(lambda loss: loss.double().backward(), id="float64"),
        pytest.param(lambda loss: loss.bfloat16().backward(), id="bf16"),
        pytest.param(lambda loss: loss.reshape(1, 1).backward(), id="with a dimension"),
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_loss_is_what_a_whole_row_has(tmp_path, backward, parts):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            for part in range(parts):
                x = batch(number + part)
                backward(F.mse_loss(model(x), x) / parts)
            optimizer.step()
            optimizer.zero_grad()

    session, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == EACH
    assert session.steps.rest.steps == len(BETWEEN)


def test_rates_of_several_groups_are_kept(tmp_path):
    def program(losses):
        model = Model()
        groups = [{"params": model.up.parameters(), "lr": 0.01}, {"params": model.down.parameters(), "lr": 0.02}]
        optimizer = torch.optim.SGD(groups)
        for number in EACH:
            optimizer.param_groups[1]["lr"] = 0.1 / number
            x = batch(number)
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()

    _, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("lr_1")) == [at for at in EACH if at != 10]  # there both are one


def gradients(kind, model, x, number):
    """Those of a step, without `backward` being called on a loss, or not on that alone."""
    if kind == "grad":
        parameters = list(model.parameters())
        found = torch.autograd.grad(F.mse_loss(model(x), x), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        return
    y = model(x)
    if kind == "handed on":  # as gradient caching does, and each step adds a loss of the weights
        F.mse_loss(kept := y.detach().requires_grad_(), x).backward()
        y.backward(kept.grad)
        sum(p.square().sum() for p in model.parameters()).backward()
    else:
        y.backward(y.detach() / number)


@pytest.mark.parametrize("kind", ["vectors", "grad", "handed on"])
def test_whose_loss_backward_is_not_called_on_has_brief_rows_without(tmp_path, kind):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            gradients(kind, model, batch(number), number)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(model.up.weight.tolist())

    session, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("grad_norm")) == list(WHOLE)
    assert list(writer.column("loss")) == (EACH if kind == "handed on" else [])
    assert {name for at in BETWEEN for name in writer.scalars[at]} == IN_BRIEF - (
        set() if kind == "handed on" else {"loss", "nonfinite"}
    )
    assert session.steps.rest.steps == len(BETWEEN)
    assert not notes(session)


def test_another_call_on_no_number_than_before_has_a_whole_row_behind_it(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            gradients("vectors", model, batch(number), number)
            if number == 14:
                y = model(batch(1))
                y.backward(y.detach())
            elif number == 17:
                F.mse_loss(model(batch(1)), batch(1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    _, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == [17]
    assert set(writer.column("grad_norm")) - set(WHOLE) == {15, 18}


@pytest.mark.parametrize("mostly", ["losses", "vectors"])
def test_one_of_the_other_kind_among_as_many_as_before_has_a_whole_row_behind_it(tmp_path, mostly):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            for part in (0, 1):
                x = batch(2 * number + part)
                if part and (number in (5, 14)) is (mostly == "losses"):
                    gradients("vectors", model, x, number)
                else:
                    F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()

    _, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == EACH
    assert set(writer.column("grad_norm")) - set(WHOLE) == {6, 15}


class Tries(torch.optim.SGD):
    """Calls its closure so many `times`."""

    times = 1

    def step(self, closure):
        for _ in range(self.times - 1):
            closure()
        return super().step(closure)


@pytest.mark.parametrize("at", [3, 11, 14])
@pytest.mark.parametrize("zeroes", [True, False])
def test_what_an_optimizer_tries_for_once_is_none_of_its_step_s_loss(tmp_path, zeroes, at):
    def program(losses):
        model, optimizer = made(Tries)
        for number in EACH:
            optimizer.times, x = 3 if number == at else 1, batch(number)

            def closure(x=x):
                if zeroes:
                    optimizer.zero_grad()
                loss = F.mse_loss(model(x), x)
                loss.backward()
                losses.append(loss.item())
                return loss

            optimizer.step(closure)
            optimizer.zero_grad()

    session, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == EACH
    assert session.steps.rest.steps == len(BETWEEN)


@pytest.mark.parametrize("zeroes", ["with it", "by the model", "never"])
def test_of_what_an_optimizer_tries_brief_rows_have_the_first(tmp_path, zeroes):
    """Each step calls its closure as often as it may: once to six times."""
    calls = []

    def program(losses):
        calls.clear()
        model = Model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05)
        for number in EACH:
            x = batch(1)
            optimizer.param_groups[0]["max_iter"] = 1 + number % 6
            calls.append(0)

            def closure(x=x):
                calls[-1] += 1
                if zeroes != "never":
                    (optimizer if zeroes == "with it" else model).zero_grad()
                loss = F.mse_loss(model(x), x)
                loss.backward()
                losses.append(loss.item())
                return loss

            optimizer.step(closure)
            if zeroes == "never":
                for p in model.parameters():
                    p.grad = None

    session, writer = with_rows_of_each(tmp_path, program)
    assert set(calls) == set(range(1, 7))
    assert list(writer.column("loss")) == EACH
    assert {name for at in BETWEEN for name in writer.scalars[at]} == IN_BRIEF
    assert session.steps.rest.steps == len(BETWEEN)
    assert not notes(session)


@pytest.mark.parametrize("kind", ["functions", "operations"])
def test_modes_of_the_program_see_nothing_of_it(tmp_path, kind):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            with Functions(seen) if kind == "functions" else FlopCounterMode(display=False):
                step(model, optimizer, number, losses)

    seen = []
    program([])
    alone, seen[:] = list(seen), []
    _, _, writer = run(tmp_path, program, "loss")
    assert seen == alone
    assert list(writer.column("loss")) == EACH


def test_an_evaluation_is_none_of_a_brief_row_s_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(Model):
        def forward(self, x):
            now[0] += 1.0
            return super().forward(x)

    def program(losses):
        model = Slow()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in EACH:
            x = batch(number)
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 14:
                losses.append(evaluated(model))

    _, writer = with_rows_of_each(tmp_path, program)
    assert {at: writer.column("step_seconds")[at] for at in BETWEEN} == dict.fromkeys(BETWEEN, 1.0)
    assert [at for at in BETWEEN if not writer.column("clean")[at]] == [15]
    assert list(writer.column("eval_loss")) == [14]


def test_a_model_s_own_zero_grad_is_heard(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            x = batch(number)
            F.mse_loss(model(x), x).backward()
            if number == 14:
                nn.Module.zero_grad(model)
                F.mse_loss(model(x), x).backward()
            optimizer.step()
            model.zero_grad()

    _, writer = with_rows_of_each(tmp_path, program)
    assert [at for at in EACH if at not in writer.column("loss")] == [14]


@pytest.mark.parametrize("scaled", ["from the start of a phase", "that skips"])
def test_a_scaler_s_loss_is_never_what_it_scaled(tmp_path, scaled):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in EACH:
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            if number < 14:
                loss.backward()
                optimizer.step()
            else:
                bad = scaled == "that skips" and number in (14, 23)
                scaler.scale(loss * (math.inf if bad else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()

    _, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == EACH
    assert list(writer.column("loss_scale")) == EACH[13:]
    bad = scaled == "that skips"
    assert [at for at in BETWEEN if at in writer.column("grad_norm")] == [15, 24] * bad
    assert list(writer.column("skipped")) == [14, 23] * bad


def test_rates_are_those_that_a_step_begins_with(tmp_path):
    class Falling(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            for group in self.param_groups:
                group["lr"] *= 0.9
            return loss

    def program(losses):
        model, optimizer = made(Falling)
        for number in EACH:
            step_plainly(model, optimizer, number)

    with_rows_of_each(tmp_path, program)


def test_rates_that_a_closure_sets_are_the_step_s(tmp_path):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        for number in EACH:
            x = batch(number)

            def closure(x=x, number=number):
                optimizer.param_groups[0]["lr"] = 0.01 / number
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), x)
                loss.backward()
                return loss

            optimizer.step(closure)

    session, _ = with_rows_of_each(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)


@pytest.mark.parametrize("steps", [EACH, [3, 12, 22]])
def test_a_penalty_s_backward_before_the_model_s_call_counts(tmp_path, steps):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        for number in EACH:
            if number in steps:
                (1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
            step_plainly(model, optimizer, number)

    _, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == EACH


def test_of_a_step_with_more_microbatches_the_loss_is_known_and_the_next_row_is_whole(tmp_path):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        for number in EACH:
            for part in range(3 if number == 14 else 2):
                x = batch(number + part)
                F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()

    _, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == EACH
    assert [at for at in BETWEEN if at in writer.column("grad_norm")] == [15]


def step_plainly(model, optimizer, number, factor=1.0):
    x = batch(number)
    (F.mse_loss(model(x), x) * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_of_a_loss_that_is_not_known_nobody_says_that_it_is_finite(tmp_path):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        for number in EACH:
            if number == 14:
                x = batch(number)
                (F.mse_loss(model(x), x) * math.inf).backward()
                optimizer.zero_grad()
            step_plainly(model, optimizer, number)

    _, writer = with_rows_of_each(tmp_path, program)
    assert [at for at in EACH if at not in writer.column("nonfinite")] == [14]
    assert [at for at in EACH if at not in writer.column("loss")] == [14]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_behind_a_loss_that_is_not_finite_the_next_row_is_whole(tmp_path, bad, dtype):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        for number in EACH:
            x = batch(number)
            (F.mse_loss(model(x), x).to(dtype) * (bad if number == 14 else 1.0)).backward()
            if number == 14:
                for p in model.parameters():
                    p.grad.zero_()
            optimizer.step()
            optimizer.zero_grad()

    _, session, writer = run(tmp_path, program, "loss")
    assert [at for at, value in writer.column("nonfinite").items() if value] == [14]
    assert not math.isfinite(writer.column("loss")[14])
    assert session.facts()["nan_steps"] == 1
    assert [at for at in BETWEEN if at in writer.column("grad_norm")] == [15]  # and it goes on as before


@pytest.mark.parametrize("kind", ["twice", "another's", "vectors"])
def test_where_steps_regularly_have_losses_that_are_not_theirs_each_row_has_one(tmp_path, kind):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        other = Model()
        for number in EACH:
            x = batch(number)
            y = model(x)
            F.mse_loss(other(y) if kind == "another's" else y, x).backward(retain_graph=True)
            if kind == "another's":
                other.zero_grad()
            elif kind == "twice":  # sharpness-aware
                optimizer.zero_grad()
                F.mse_loss(model(x), x).backward()
            else:
                y.backward(torch.ones_like(y) * 1e-3)
            optimizer.step()
            optimizer.zero_grad()

    _, writer = with_rows_of_each(tmp_path, program)
    assert list(writer.column("loss")) == EACH


@pytest.mark.parametrize("way", ["by name", "in its place", "two of them", "of a function"])
def test_backward_for_an_input_s_gradient_alone_is_none_of_the_step_s(tmp_path, way):
    """An adversary's: what the model is given next is the batch, moved by it."""

    def program(losses):
        model, optimizer = made()
        for number in EACH:
            x = batch(number)
            moved, beside = x.clone().requires_grad_(), torch.zeros(1, requires_grad=True)
            loss = F.mse_loss(model(moved), x) + beside.sum()
            if way == "by name":
                loss.backward(inputs=moved)
            elif way == "in its place":
                torch.autograd.backward(loss, None, None, False, None, [moved])
            elif way == "two of them":
                loss.backward(inputs=(moved, beside))
            else:
                torch.autograd.backward([loss], inputs=[moved])
            assert all(p.grad is None for p in model.parameters())
            loss = F.mse_loss(model(moved.detach() + 0.1 * moved.grad.sign()), x)
            loss.backward(inputs=[*model.parameters()])
            losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    session, writer = with_rows_of_each(tmp_path, program)
    losses, _, every = run(tmp_path, program, "all")
    assert list(every.column("loss").values()) == losses
    assert set(every.column("microbatches").values()) == {1.0}
    assert list(writer.column("loss").values()) == losses
    assert session.steps.rest.steps == len(BETWEEN)
