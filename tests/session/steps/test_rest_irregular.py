"""Programs that are left alone between recorded steps, and do there what they did not do before, or in other places.

What has a row is as if every step had one, steps and evaluations as well; `compared` says so of each.
"""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from tests.session.steps.alone import (
    AROUND,
    Interrupted,
    Model,
    Wrapper,
    batch,
    compared,
    made,
    notes,
    nothing_is_compiled,
)
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["nothing_is_compiled"]  # a fixture for each test here, too


def evaluate(model, losses, number=100):
    with torch.no_grad():
        losses.append(F.mse_loss(model(batch(number)), batch(number)).item())


def train(losses, model, optimizer, number, between=lambda number: None):
    """A step of two microbatches; something is called `between` them."""
    for part in (0, 1):
        x = batch(2 * number + part)
        loss = F.mse_loss(model(x), x) / 2
        loss.backward()
        losses.append(loss.item())
        if not part:
            between(number)
    optimizer.step()
    optimizer.zero_grad()


def grows(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def is_loaded(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def another_is_made(model, optimizer):
    torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("happens", [grows, is_loaded, another_is_made])
def test_a_step_of_which_a_part_was_not_heard_has_no_row(tmp_path, happens):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            train(losses, model, optimizer, number, lambda number: number == 15 and happens(model, optimizer))

    _, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == [1, 2, 9, 10, 11, 16, 19, 20, 21]


def test_a_part_that_is_called_first_in_the_middle_of_a_step(tmp_path):
    def program(losses):
        torch.manual_seed(0)
        encoder, decoder, head = (nn.Linear(16, 16) for _ in range(3))
        optimizer = torch.optim.AdamW(nn.ModuleList([encoder, decoder, head]).parameters(), lr=0.01)
        for number in range(1, 25):
            for part in (0, 1):
                x = batch(2 * number + part)
                hidden = encoder(x)
                loss = F.mse_loss(decoder(hidden), x)
                if number >= 15 and part:
                    loss = loss + F.mse_loss(head(hidden), x)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    session, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == [1, 2, 9, 10, 11, *range(16, 25)]
    assert "about step 15 was not as before" in notes(session)[1]


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("every", [5, 8])  # in the middle of what is left alone, and at its end
def test_an_optimizer_that_joins_in_now_and_then(tmp_path, order, every):
    def program(losses):
        model = Model()
        often, seldom = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.up, model.down))
        for number in range(1, 25):
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            loss.backward()
            losses.append(loss.item())
            both = [often, seldom] if number % every == 0 else [often]
            for optimizer in both if order == "last" else both[::-1]:
                optimizer.step()
            model.zero_grad()

    _, writer = compared(tmp_path, program, turns=True)
    assert writer.column("turn")
    with followed(tmp_path, compiling=True, judge="current", every=10) as (_, all_of_them):
        program([])
    assert writer.column("turn") == {at: all_of_them.column("turn")[at] for at in writer.column("turn")}


def test_where_a_step_is_made_group_by_group_each_has_a_row(tmp_path):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        for number in range(1, 25):
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            loss.backward()
            losses.append(loss.item())
            for part in (model.up, model.down):
                optimizer.param_groups[0]["params"] = list(part.parameters())
                optimizer.step()
            model.zero_grad()

    _, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == list(range(1, 25))


def test_an_optimizer_that_wraps_another_is_left_alone_too(tmp_path):
    def program(losses):
        model, optimizer = made(torch.optim.SGD)
        optimizer = Wrapper(optimizer)
        for number in range(1, 25):
            train(losses, model, optimizer, number)

    session, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == AROUND
    assert len(notes(session)) == 1


def test_steps_in_backward_by_optimizers_that_were_there_before(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.session.steps.cycle.AWAITED", 2)  # nor is the other one's turn awaited

    def program(losses):
        model, leader = made(torch.optim.SGD)
        own = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
        for number in range(1, 25):
            if number == 15:
                for p in model.parameters():
                    p.register_post_accumulate_grad_hook(lambda p: own[p].step())
            model.zero_grad()
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            loss.backward()
            losses.append(loss.item())
            if number < 15:
                leader.step()

    _, writer = compared(tmp_path, program, turns=True)
    assert list(writer.column("loss")) == [1, 2, 9, 10, 11, *range(16, 25)]


def test_evaluations_of_one_step_are_told_apart(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            loss.backward()
            losses.append(loss.item())
            if number % 3 == 0:
                evaluate(model, losses, 200)
            optimizer.step()
            optimizer.zero_grad()
            if number % 2 == 0:
                evaluate(model, losses, 100)

    session, _ = compared(tmp_path, program)
    assert session.facts()["watch"]["steps_left_alone"] == 16


@pytest.mark.parametrize("between", [False, True])  # a step's microbatches
def test_evaluations_are_not_kept_until_it_ends(tmp_path, between):
    watch = {"scalars": "recorded"}
    with followed(tmp_path, compiling=True, judge="current", watch=watch, every=1000) as (session, writer):
        model, optimizer = made()
        for number in range(1, 50):
            train([], model, optimizer, number, lambda number: between and evaluate(model, []))
            if not between:
                evaluate(model, [])
        assert session.steps.rest.steps > 40
        assert len(session.steps.evals._losses) <= 1
    assert set(writer.column("eval_loss")) == {number - between for number in range(1, 50)}


class Listed(nn.Module):
    """Has a word of its own for its parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def parameters(self, recurse=True):
        return [self.weight]

    def forward(self, x, y):
        return F.mse_loss(x, y)


class Refused(Listed):
    def parameters(self):
        raise RuntimeError("are nobody's business")


@pytest.mark.parametrize("kind", [Listed, Refused])
@pytest.mark.filterwarnings("ignore")
def test_a_module_with_a_word_of_its_own_for_its_parameters(tmp_path, kind):
    def program(losses):
        model, optimizer = made()
        measure = kind()
        for number in range(1, 25):
            x = batch(number)
            loss = measure(model(x), x)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    alone, losses = [], []
    program(alone)
    watch = {"scalars": "recorded"}
    with followed(tmp_path, compiling=True, judge="current", watch=watch, every=10) as (session, writer):
        program(losses)
    assert losses == alone
    assert session.facts()["steps"] == 24
    assert list(writer.column("loss")) == AROUND


def test_a_mode_of_the_program_s_sees_nothing_of_ours(tmp_path):
    def program(seen):
        class Mode(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                seen.append(getattr(function, "__name__", str(function)))
                return function(*args, **(kwargs or {}))

        model, optimizer = made()
        with Mode():
            for number in range(1, 25):
                x = batch(number)
                F.mse_loss(model(x), x).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number % 5 == 0:
                    evaluate(model, [])

    compared(tmp_path, program)


def test_what_is_asked_in_a_transform_is_no_training(tmp_path):
    def program(losses):
        model, optimizer = made()

        def probed(parameters):
            return F.mse_loss(torch.func.functional_call(model, parameters, (batch(100),)), batch(100))

        for number in range(1, 25):
            train(losses, model, optimizer, number)
            with torch.no_grad():
                output = model(batch(100))
            torch.func.grad(probed)({name: p.detach() for name, p in model.named_parameters()})
            with torch.no_grad():
                losses.append(F.mse_loss(output, batch(100)).item())

    _, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == list(range(1, 25))


def test_a_model_that_is_called_with_gradients_in_an_evaluation_trains_nothing(tmp_path):
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.head = inner, nn.Linear(16, 16)

        def forward(self, x):
            with torch.enable_grad():
                hidden = self.inner(x)
            return self.head(hidden if torch.is_grad_enabled() else hidden.detach())

    def program(losses):
        inner = Model()
        whole = Around(inner)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
        for number in range(1, 25):
            x = batch(number)
            loss = F.mse_loss(inner(x), x) + F.mse_loss(whole(x), x)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if number % 3 == 0:
                evaluate(whole, losses)

    _, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == list(range(3, 25, 3))


def test_a_copy_is_evaluated_behind_a_forward_that_trains(tmp_path):
    class Trainer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Model()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

        def forward(self, x):
            loss = F.mse_loss(self.model(x), x)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.item()

    def program(losses):
        trainer, copy = Trainer(), Model()
        for number in range(1, 25):
            losses.append(trainer(batch(number)))
            if number % 4 == 0:
                evaluate(copy, losses)

    _, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == list(range(4, 25, 4))


@pytest.mark.parametrize("gradients", [True, False])
def test_a_copy_is_evaluated_after_an_interrupt(tmp_path, gradients):
    def program(losses):
        model, copy = Interrupted(), Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, 25):
            if number == 5:
                model.stops = True
                with torch.set_grad_enabled(gradients), pytest.raises(KeyboardInterrupt):
                    model(batch(1))
                model.stops = False
            train(losses, model, optimizer, number)
            if number % 2 == 0:
                evaluate(copy, losses)

    _, writer = compared(tmp_path, program)
    assert list(writer.column("eval_loss")) == list(range(2, 25, 2))


def test_another_thread_that_calls_backward_takes_no_step_away(tmp_path):
    def program(losses):
        model, optimizer = made()
        for number in range(1, 25):
            x = batch(number)
            loss = F.mse_loss(model(x), x)
            losses.append(loss.item())
            if number in (7, 15):
                thread = threading.Thread(target=functools.partial(loss.backward))
                thread.start()
                thread.join()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    _, writer = compared(tmp_path, program)
    assert list(writer.column("loss")) == AROUND
