"""Brief rows of one model that is watched beside others: these have their own losses and steps."""

import sys

import pytest
import torch
import torch.nn.functional as F
from tests.session.doors.test_deepspeed import ENGINE, Engine, loaded
from tests.session.inline import Writer
from tests.session.steps.alone import Model, batch, notes, nothing_is_compiled
from tests.session.steps.test_brief import BETWEEN, EACH, IN_BRIEF
from torch import nn

from narrowgauge.session.attach import Session
from narrowgauge.session.plan import Plan

__all__ = ["loaded", "nothing_is_compiled"]  # fixtures, the second for each test here


def watched(tmp_path, program, scalars):
    """The losses of a program, and the session and the writer of the first of its two models."""
    models = model, _ = Model(), Model()
    plan = Plan(
        variant="x", out=str(tmp_path), command=("train.py",), compiling=True, judge="current", every=10,
        watch={"scalars": scalars},
    )  # fmt: skip
    writer, losses = Writer(), []
    session = Session(plan, writer, only=model)
    try:
        program(losses, *models)
    finally:
        session.finish()
    assert not [note for note in session.facts()["notes"] if "failed" in note]
    return losses, session, writer


def in_brief(tmp_path, program, missing=()):
    """What is watched of it, in brief; all that rows have is what whole ones have."""
    wanted, _, every = watched(tmp_path, program, "all")
    losses, session, writer = watched(tmp_path, program, "loss")
    assert losses == wanted
    for name in ("loss", "lr", "lr_0", "lr_1", "grad_norm", "tokens", "eval_loss", "skipped", "loss_scale"):
        there = writer.column(name)
        assert there == {at: every.column(name)[at] for at in there}, name
    assert list(writer.column("lr")) == EACH
    assert [at for at in EACH if at not in writer.column("loss")] == list(missing)
    assert not notes(session)
    return session, writer


def sgd(*models, lr=0.01):
    return [torch.optim.SGD(model.parameters(), lr=lr * at) for at, model in enumerate(models, 1)]


def loss_of(model, x, losses):
    loss = F.mse_loss(model(x), x)
    losses.append(loss.item())
    return loss


def alternating(losses, model, other):
    own, others = sgd(model, other)
    for number in EACH:
        for each, optimizer in ((model, own), (other, others), (other, others)):
            optimizer.zero_grad()
            loss_of(each, batch(number), losses).backward()
            optimizer.step()


def before_it(losses, model, other):
    """The others' step comes between the model's backward and its step; of them one is in two groups."""
    own = torch.optim.SGD(model.parameters(), lr=0.01)
    others = torch.optim.SGD([{"params": other.up.parameters(), "lr": 0.1}, {"params": other.down.parameters()}], 0.2)
    for number in EACH:
        loss_of(model, batch(number), losses).backward()
        loss_of(other, batch(number), losses).backward()
        others.step()
        own.step()
        own.zero_grad()
        others.zero_grad()


def adversaries(losses, model, other):
    """A generator, whose loss the discriminator says; and what it makes is looked at without it, too."""
    own, others = sgd(model, other)
    for number in EACH:
        made = model(batch(number))
        others.zero_grad()
        judged = other(made.detach()).square().mean() + loss_of(other, batch(number + 1), losses)
        judged.backward()
        others.step()
        own.zero_grad()
        loss = (other(made) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        own.step()


def with_closures(losses, model, other):
    own, others = sgd(model, other)
    for number in EACH:
        for each, optimizer in ((other, others), (model, own)):

            def closure(each=each, optimizer=optimizer, number=number):
                optimizer.zero_grad()
                loss = loss_of(each, batch(number), losses)
                loss.backward()
                return loss

            optimizer.step(closure)


def sharp(losses, model, other):
    """Gradients of both are set to zero in mid-step, and the others' optimizer calls a closure there."""
    own, others = sgd(model, other)
    for number in EACH:
        x = batch(number)
        loss_of(model, x, losses).backward()
        own.zero_grad()

        def closure(x=x):
            others.zero_grad()
            loss = loss_of(other, x, losses)
            loss.backward()
            return loss

        others.step(closure)
        loss_of(model, x, losses).backward()
        own.step()
        own.zero_grad()


def scaled(losses, model, other):
    own, others = sgd(model, other)
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0)]
    for number in EACH:
        for each, optimizer, scaler in zip((model, other), (own, others), scalers, strict=True):
            scaler.scale(loss_of(each, batch(number), losses)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def of_two_optimizers(losses, model, other):
    first, second, others = sgd(model.up, model.down, other)
    for number in EACH:
        loss_of(model, batch(number), losses).backward()
        first.step()
        loss_of(other, batch(number), losses).backward()
        others.step()
        second.step()
        model.zero_grad()
        other.zero_grad()


@pytest.mark.parametrize(
    "program", [alternating, before_it, adversaries, with_closures, sharp, scaled, of_two_optimizers]
)
def test_losses_rates_and_steps_are_the_watched_model_s_alone(tmp_path, program):
    session, writer = in_brief(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)
    assert session.facts()["steps"] == len(EACH)
    more = {"loss_scale", "lr_0", "lr_1"}
    assert all(IN_BRIEF <= set(writer.scalars[at]) <= IN_BRIEF | more for at in BETWEEN)


def test_others_that_come_while_the_program_is_left_alone_are_told_apart(tmp_path):
    def program(losses, model, other):
        (own,) = sgd(model)
        for number in EACH:
            if number == 15:
                (others,) = sgd(other)
            loss_of(model, batch(number), losses).backward()
            if number >= 15:
                loss_of(other, batch(number), losses).backward()
                others.step()
            own.step()
            own.zero_grad()

    session, _ = in_brief(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)


def test_what_is_called_beside_it_is_found_once_it_trains(tmp_path):
    def program(losses, model, other):
        (own,) = sgd(model)
        for number in EACH:
            if number == 15:
                own.param_groups[0]["params"].extend(other.parameters())
            loss_of(model, batch(number), losses).backward()
            loss_of(other, batch(number), losses).backward()
            own.step()
            own.zero_grad()
            other.zero_grad()

    wanted, every, _ = watched(tmp_path, program, "all")
    losses, session, _ = watched(tmp_path, program, "loss")
    assert losses == wanted
    assert session.facts()["models"] == every.facts()["models"] == 2
    assert "about step 15 was not as before" in notes(session)[0]  # that was seen at once


def test_a_backward_of_others_that_raises_leaves_the_loss(tmp_path):
    def program(losses, model, other):
        own, others = sgd(model, other)
        for number in EACH:
            loss_of(model, batch(number), losses).backward()
            loss = loss_of(other, batch(number), losses)
            loss.backward()
            if number == 14:
                with pytest.raises(RuntimeError, match="second time"):
                    loss.backward()
            others.step()
            own.step()
            own.zero_grad()
            others.zero_grad()

    in_brief(tmp_path, program)


def norm_of(model):
    """That of its gradients, as they are."""
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize("at", ["before its backward", "before its clip", "before its step"])
@pytest.mark.parametrize("clips", ["others", "both"])
def test_clips_of_the_others_are_none_of_its_norm(tmp_path, clips, at):
    wanted = []

    def program(losses, model, other):
        own, others = sgd(model, other)
        wanted.clear()

        def trains_others(now, number):
            if now == at:
                others.zero_grad()
                loss_of(other, batch(number + 9), losses).backward()
                nn.utils.clip_grad_norm_(other.parameters(), 0.1)
                others.step()

        for number in EACH:
            trains_others("before its backward", number)
            own.zero_grad()
            loss_of(model, batch(number), losses).backward()
            wanted.append(norm_of(model))
            trains_others("before its clip", number)
            if clips == "both":
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            trains_others("before its step", number)
            own.step()

    session, _ = in_brief(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)
    _, _, every = watched(tmp_path, program, "all")
    assert list(every.column("grad_norm").values()) == pytest.approx(wanted)


@pytest.mark.parametrize("own", ["engine", "optimizer"])
@pytest.mark.parametrize("at", ["before its backward", "before its step", "behind its step"])
def test_an_engine_of_the_others_makes_none_of_its_steps(tmp_path, loaded, at, own):
    """Neither its norm, which it clips by, nor that it skips, is the watched model's."""

    class Clips(Engine):
        def _take_model_step(self):
            sys.modules[ENGINE].clip_grad_norm_(self.module.parameters(), max_norm=1.0)
            super()._take_model_step()

    wanted = []

    def program(losses, model, other):
        others = Clips(other)
        engine = Engine(model) if own == "engine" else None
        optimizer = None if engine else torch.optim.SGD(model.parameters(), lr=0.01)
        wanted.clear()

        def trains_others(now, number):
            if now == at:
                loss = loss_of(other, batch(number + 9), losses)
                others.backward(loss * (1e30 if number in (3, 14) else 1.0))
                others.step()

        for number in EACH:
            trains_others("before its backward", number)
            loss_of(model, batch(number), losses).backward()
            wanted.append(norm_of(model))
            trains_others("before its step", number)
            if engine:
                engine.step()
            else:
                optimizer.step()
                optimizer.zero_grad()
            trains_others("behind its step", number)
        assert others.skipped_steps == 2

    loaded()
    session, writer = in_brief(tmp_path, program)
    assert session.steps.rest.steps == len(BETWEEN)
    assert session.facts()["steps"] == len(EACH)
    assert not writer.column("skipped")
    assert not any(writer.column("nonfinite").values())
    _, _, every = watched(tmp_path, program, "all")
    assert list(every.column("grad_norm").values()) == pytest.approx(wanted)
    assert not every.column("skipped")
