"""Steps that are left alone and are as those before them: they are not looked at one by one, and what comes is.

Where something comes between, `compared` says that all is as if each had been looked at.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from tests.session.steps.alone import (
    AROUND,
    Model,
    Wrapper,
    batch,
    compared,
    evaluated,
    made,
    nothing_is_compiled,
    plain,
    run,
    step,
)
from torch.utils.data import DataLoader

from narrowgauge.session.models.alone import CallsAlone
from narrowgauge.session.steps.loading import Loading
from narrowgauge.session.steps.steps import Steps

__all__ = ["nothing_is_compiled"]  # a fixture for each test here


@pytest.fixture
def looked_at(monkeypatch):
    """The numbers of the steps that were made when a call, or a step, was looked at, while it was left alone."""
    found = {"called": [], "stepped": []}

    def told_of(kind, method, where, steps):
        @functools.wraps(method)
        def run(self, *args, **kwargs):
            found[kind].append(steps(self).ledger.steps)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(*where, run)

    told_of("called", CallsAlone._called, (CallsAlone, "_called"), lambda calls: calls._steps)
    told_of("stepped", Steps.left_alone, (Steps, "left_alone"), lambda steps: steps)
    return found


def test_the_first_of_those_between_is_looked_at_and_the_last(tmp_path, looked_at):
    _, session, _ = run(tmp_path, plain)
    assert session.steps.rest.steps == 16
    assert looked_at == {"called": [2, 2, 11, 11, 21, 21], "stepped": [2, 7, 11, 17, 21]}
    assert session.updates.ended == 24
    assert session.steps.ledger.rows.pace._steps[False] >= 16  # a recorded one's cost is told beside all others'


def test_where_no_recorded_one_comes_the_first_alone_is(tmp_path, looked_at):
    run(tmp_path, plain, every=1000)
    assert looked_at == {"called": [2, 2], "stepped": [2]}


def test_behind_an_evaluation_the_next_is_looked_at(tmp_path, looked_at):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            step(model, optimizer, number, losses)
            if number == 14:
                losses.append(evaluated(model))

    run(tmp_path, program, every=1000)
    assert looked_at == {"called": [2, 2, 14, 14], "stepped": [2, 14]}


def test_a_frozen_model_beside_it_changes_nothing(tmp_path):
    def program(losses):
        model, optimizer = made()
        frozen = Model().requires_grad_(False)
        for number in range(1, 25):
            step(model, optimizer, number, losses)
            if number % 2:
                frozen(batch(1))

    _, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == AROUND


class Metric:
    """A program whose batches have metrics; what is called without gradients meanwhile, and led to no loss, is told."""

    def __init__(self, asked, where, at):
        self.asked, self.where, self.at = asked, where, at

    def __call__(self, losses):
        model, optimizer = made()
        called = {"model": model, "copy": Model(), "part": model.up}[self.asked]

        def look(where, number):
            if where == self.where and number in self.at:
                with torch.no_grad():
                    losses.append(called(batch(number)).sum().item())

        for number in range(1, 25):
            x = batch(number)
            y = model(x)
            look("forward", number)
            loss = F.mse_loss(y, x)
            with torch.no_grad():
                losses.append(F.l1_loss(y.detach(), x).item())
            look("metric", number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look("step", number)


@pytest.mark.parametrize("at", [(14,), (18,), (13, 15), range(25)])
@pytest.mark.parametrize("where", ["forward", "metric", "step"])
@pytest.mark.parametrize("asked", ["model", "copy", "part"])
def test_what_is_called_behind_a_forward_or_a_metric_or_a_step(tmp_path, asked, where, at):
    compared(tmp_path, Metric(asked, where, at))


@pytest.mark.parametrize("copied", [False, True])
def test_an_evaluation_on_batches_that_were_waited_for(tmp_path, copied):
    """Its batches come of a loader, as the training's do."""

    def program(losses):
        model, optimizer = made()
        judged = Model() if copied else model
        loader = DataLoader([batch(number)[:4] for number in range(12)], batch_size=None)
        for epoch in range(2):
            for number, x in enumerate(loader, 1 + 12 * epoch):
                loss = F.mse_loss(model(x), x)
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                if number in (6, 7, 14):
                    with torch.no_grad():
                        losses += [F.mse_loss(judged(x), x).item() for x in loader]

    _, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == [6, 7, 14]


def test_a_row_has_waited_for_its_own_batch_alone(tmp_path, monkeypatch):
    loaded = Loading.batch_loaded
    monkeypatch.setattr(Loading, "batch_loaded", lambda self, seconds, *args, **more: loaded(self, 1.0, *args, **more))

    def program(losses):
        model, optimizer = made()
        for number, x in enumerate(DataLoader([batch(number) for number in range(24)], batch_size=None), 1):
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 14:
                losses.append(evaluated(model))

    _, _, writer = run(tmp_path, program)
    assert writer.column("data_seconds") == dict.fromkeys(AROUND, 1.0)


def test_an_evaluation_by_hand_behind_a_metric_is_told(tmp_path):
    def program(losses):
        model, optimizer = made()
        loader = DataLoader([batch(number)[:4] for number in range(3)], batch_size=None)
        for number in range(1, 25):
            x = batch(number)
            y = model(x)
            if number == 14:
                with torch.no_grad():
                    losses.append(F.l1_loss(y.detach(), x).item())
            F.mse_loss(y, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 15:
                with torch.no_grad():
                    losses += [(model.eval()(x) - x).square().mean().item() for x in loader]
                model.train()

    session, _ = compared(tmp_path, program)
    assert [note for note in session.facts()["notes"] if note.startswith("3 calls of models in evaluations")]


def test_a_program_that_calls_no_model_as_a_whole(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            x = batch(number)
            hidden = F.linear(x, model.up.weight, model.up.bias)
            loss = F.mse_loss(F.linear(hidden, model.down.weight, model.down.bias), x)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if number % 5 == 0:
                losses.append(evaluated(model))

    compared(tmp_path, program)


@pytest.mark.parametrize("times", [1, 3])
def test_what_an_optimizer_steps_within_another_is_no_step(tmp_path, times):
    def program(losses):
        model, inner = made(torch.optim.SGD)
        outer = Wrapper(inner, times=2)
        for number in range(1, 25):
            step(model, outer if 15 <= number < 15 + times else inner, number, losses)

    compared(tmp_path, program, turns=True)


@pytest.mark.parametrize("tries", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_nor_where_the_inner_one_is_given_the_closure(tmp_path, kind, tries):
    class Outer(Wrapper):
        def step(self, closure):
            if tries:
                closure()
            self.inner.step(closure)

    def program(losses):
        model, inner = made(kind)
        outer = Outer(inner)
        for number in range(1, 25):
            x = batch(number)

            def closure(x=x):
                outer.zero_grad()
                loss = F.mse_loss(model(x), x)
                loss.backward()
                losses.append(loss.item())
                return loss

            outer.step(closure)

    session, _ = compared(tmp_path, program)
    assert session.steps.rest.steps == 16


def test_what_an_optimizer_steps_to_make_its_state_is_no_step(tmp_path):
    watch = {"scalars": "recorded"}
    with followed(tmp_path, compiling=True, judge="current", watch=watch, every=1000) as (session, _):
        model, optimizer = made()
        for number in range(1, 6):
            step(model, optimizer, number, [])
        F.mse_loss(model(batch(6)), batch(6)).backward()
        session.updates.prepares += 1
        optimizer.step()
        session.updates.prepares -= 1
        assert session.steps.ledger.steps == 5
        optimizer.step()
        assert session.steps.ledger.steps == 6
        assert session.steps.rest.on


def test_what_is_called_in_turn(tmp_path):
    """Two models, of one optimizer."""

    def program(losses):
        one, other = Model(), Model()
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.01)
        for number in range(1, 25):
            x = batch(number)
            loss = F.mse_loss(one(x) + other(x), x)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if number == 15:
                other.requires_grad_(False)
            if number == 6:
                losses += [evaluated(one), evaluated(other)]

    _, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == [6]


@pytest.mark.parametrize("closes", [True, False])
def test_an_optimizer_without_a_rate_has_none(tmp_path, closes):
    class Unrated(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=lambda: None):
            with torch.enable_grad():
                closure()
            for group in self.param_groups:
                torch._foreach_add_(group["params"], [p.grad for p in group["params"]], alpha=-0.01)

    def program(losses):
        model = Model()
        optimizer = Unrated(model.parameters(), {})
        for number in range(1, 25):

            def closure(number=number):
                optimizer.zero_grad()
                loss = F.mse_loss(model(batch(number)), batch(number))
                loss.backward()
                losses.append(loss.item())

            if not closes:
                closure()
            optimizer.step(*[closure] * closes)

    every = [run(tmp_path, program, scalars) for scalars in ("all", "loss", "recorded")]
    assert every[0][0] == every[1][0] == every[2][0]
    assert all(writer.column("loss").items() <= every[0][2].column("loss").items() for _, _, writer in every)
    assert every[1][1].steps.rest.steps > every[2][1].steps.rest.steps > 0
