"""Programs left alone whose optimizers take turns: a GAN, actor and critic."""

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import (
    Model,
    assert_same_tensors,
    batch,
    compared,
    evaluated,
    made,
    notes,
    nothing_is_compiled,
    run,
    step,
)
from torch import nn

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

EACH = range(1, 25)


def alternating(losses):
    model, one = made()
    other, two = made(torch.optim.SGD)
    for number in EACH:
        step(*((model, one) if number % 2 else (other, two)), number, losses)


def test_whose_turn_is_next_is_known(tmp_path):
    session, writer = compared(tmp_path, alternating)
    rows = [1, 2, 3, 4, 9, 10, 11, 12, 13, 19, 20, 21, 22, 23]  # a recorded one brings those of the others with it
    assert list(writer.column("loss")) == rows
    assert session.steps.rest.steps == 10
    _, session, brief = run(tmp_path, alternating, "loss")
    assert session.steps.rest.steps == 24 - len([1, 2, 3, 4, 10, 11, 12, 20, 21, 22])
    assert brief.column("turn") == {at: (at + 1) % 2 for at in EACH[1:]}  # of the first nobody knows that there are any
    assert not notes(session)


def gan(losses, times=1, more=lambda number, critic, generator, losses: None, rounds=24):
    """So many steps of a critic, of two backwards each, then one of the generator, through the critic."""
    torch.manual_seed(0)
    critic, generator = Model(), Model()
    of_critic = torch.optim.AdamW(critic.parameters(), lr=0.01)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.02)
    for number in range(1, rounds + 1):
        x = batch(number)
        if number % (times + 1):
            with torch.no_grad():
                made = generator(x)
            for loss in (critic(x).square().mean(), -critic(made).square().mean().sigmoid()):
                loss.backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            of_critic.step()
        else:
            loss = critic(generator(x)).square().mean()
            loss.backward()
            losses.append(loss.item())
            of_generator.step()
        of_critic.zero_grad()
        of_generator.zero_grad()
        more(number, critic, generator, losses)


def as_in_whole_rows(tmp_path, program, **more):
    """The session of a program in brief, whose losses, rates, turns and recorded tensors are those of whole rows."""
    wanted, _, every = run(tmp_path, program, "all", **more)
    losses, session, writer = run(tmp_path, program, "loss", **more)
    assert losses == wanted
    for name in ("loss", "lr", "turn"):
        assert writer.column(name) == every.column(name), name
    assert_same_tensors(writer, every)
    return session


def test_a_gan(tmp_path):
    session, _ = compared(tmp_path, gan)
    assert session.steps.rest.steps == 10


@pytest.mark.parametrize("times", [2, 3, 5, 10, 12, 15])
def test_a_critic_of_several_steps_is_not_taken_to_be_alone(tmp_path, times):
    def program(losses):
        gan(losses, times, rounds=72 if times < 10 else 150)

    session = as_in_whole_rows(tmp_path, program, every=30)
    assert session.steps.rest.steps > 36
    assert not notes(session)


def looks(number, critic, generator, losses):
    if number in (6, 15):
        losses.append(evaluated(generator))


def steps_once_more(number, critic, generator, losses):
    if number == 15:
        other = torch.optim.SGD(critic.parameters(), lr=0.5)
        critic(batch(3)).square().mean().backward()
        other.step()
        other.zero_grad()


@pytest.mark.parametrize(("more", "steps"), [(looks, 24), (steps_once_more, 25)])
def test_what_comes_between(tmp_path, more, steps):
    compared(tmp_path, lambda losses: gan(losses, more=more), turns=True, steps=steps)


@pytest.mark.parametrize("skipped", [14, 15])
def test_one_s_turn_is_left_out(tmp_path, skipped):
    def program(losses):
        model, one = made()
        other, two = made(torch.optim.SGD)
        for number in range(1, 26):
            if number != skipped:
                step(*((model, one) if number % 2 else (other, two)), number, losses)

    compared(tmp_path, program, turns=True)


def test_actor_and_critic_of_one_batch(tmp_path):
    def program(losses):
        actor, critic = Model(), Model()
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01 * at) for at, each in enumerate((critic, actor), 1)]
        for number in range(1, 13):
            x = batch(number)
            loss = F.mse_loss(critic(x), x)
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            losses.append(loss.item())
            loss = -critic(actor(x)).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            losses.append(loss.item())

    session, _ = compared(tmp_path, program)
    assert session.steps.rest.steps


def test_a_step_out_of_turn_moves_no_other_s(tmp_path):
    """Or a recorded step would be followed by others for one that was silent for longer than ever."""

    def program(losses):
        model, one = made()
        other, two = made(torch.optim.SGD)
        for turn in "112" + "12" * 15 + "112" + "12" * 4:
            step(*((model, one) if turn == "1" else (other, two)), len(losses) + 1, losses)

    assert as_in_whole_rows(tmp_path, program, every=4).steps.rest.steps


def test_an_epoch_s_last_round_may_be_shorter(tmp_path):
    """As of a critic of five steps whose batches are no multiple of five: once out of turn, no step was left alone."""

    def program(losses):
        model, one = made()
        other, two = made(torch.optim.SGD)
        for turn in ("111112" * 12 + "112") * 3:
            step(*((model, one) if turn == "1" else (other, two)), len(losses) + 1, losses)

    session = as_in_whole_rows(tmp_path, program, every=30)
    assert session.steps.rest.steps > 3 * 30
    assert not notes(session)


def test_who_takes_turns_by_chance_is_not_left_alone_for_ever(tmp_path):
    def program(losses):
        model, one = made()
        other, two = made(torch.optim.SGD)
        torch.manual_seed(0)
        for turn in torch.randint(0, 2, (150,)).tolist():
            step(*((model, one) if turn else (other, two)), len(losses) + 1, losses)

    assert as_in_whole_rows(tmp_path, program).steps.rest.steps < 50


def test_a_turn_that_calls_no_model(tmp_path):
    """The temperature of a soft actor and its critic."""

    def program(losses):
        actor, critic, temperature = Model(), Model(), nn.Parameter(torch.ones(1))
        optimizers = [torch.optim.SGD(x, lr=0.01) for x in (critic.parameters(), actor.parameters(), [temperature])]
        for number in range(1, 13):
            x = batch(number)
            for turn, optimizer in enumerate(optimizers):
                if turn == 0:
                    loss = F.mse_loss(critic(x), x)
                elif turn == 1:
                    loss = (critic(made := actor(x)) * temperature.detach()).mean()
                else:
                    loss = -(temperature * made.detach().mean()).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

    session, _ = compared(tmp_path, program, turns=True, steps=36, every=12)
    assert session.steps.rest.steps
    _, session, brief = run(tmp_path, program, "loss", every=12)
    assert list(brief.column("loss")) == list(range(1, 37))
    assert session.steps.rest.steps > 12
    assert not notes(session)


@pytest.mark.parametrize("kind", ["no model", "made anew"])
def test_why_whose_steps_never_come_again_has_whole_rows(tmp_path, kind):
    def program(losses):
        model, optimizer = made()
        for number in EACH:
            if kind == "made anew":
                step(model, torch.optim.SGD(model.parameters(), lr=0.01), number, losses)
                continue
            optimizer.zero_grad()
            (batch(number) @ model.up.weight.T).square().mean().backward()
            optimizer.step()

    _, session, writer = run(tmp_path, program, "loss")
    assert list(writer.column("grad_norm")) == list(EACH)
    assert notes(session) == [
        'watch.scalars is "loss", but the program\'s steps do not come again as they were, by the same optimizers, or '
        "call no model: each step has a whole row."
    ]
    _, session, _ = run(tmp_path, program, "auto")
    assert not notes(session)


@pytest.mark.parametrize("passes", [False, True])
def test_what_a_model_made_in_a_brief_step_is_no_data_in_a_recorded_one(tmp_path, passes):
    """A picture goes from the generator to both critics; not so one that its call only passed through."""

    class Generator(Model):
        def forward(self, x):
            return (x if passes else x + 1), super().forward(x)

    def program(losses):
        generator, critics = Generator(), [Model(), Model()]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (generator, *critics)]
        for number in range(1, 17):
            given, picture = generator(batch(number))
            for turn, optimizer in enumerate(optimizers):
                if not turn:
                    loss = sum(F.mse_loss(critic(picture), picture.detach()) for critic in critics)
                else:
                    loss = critics[turn - 1](picture.detach()).square().mean() + critics[turn - 1](given).abs().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

    wanted, _, every = run(tmp_path, program, "all")
    losses, session, writer = run(tmp_path, program, "loss")
    assert losses == wanted
    assert session.steps.rest.steps > 16
    there = writer.column("tokens")
    assert {10, 20, 30, 40} <= set(writer.column("grad_norm"))
    assert there == {at: count for at, count in every.column("tokens").items() if at in writer.column("grad_norm")}


def test_turns_that_come_seldom_are_awaited_as_ever(tmp_path):
    def program(losses):
        pairs = [made(torch.optim.SGD) for _ in range(4)]
        for number in range(72):
            step(*pairs[(0, 1, 2, 2, 3, 3, 3)[number % 7]], number + 1, losses)

    _, _, every = run(tmp_path, program, "all")
    _, session, writer = run(tmp_path, program, "loss")
    assert [at for at, _, _ in writer.tensors] == [at for at, _, _ in every.tensors]
    assert session.steps.rest.steps
