"""Programs that train in turns: each step says whose it is."""

import torch
from tests.session.inline import followed
from torch import nn

from narrowgauge.session.steps.turns import MOST, Turns


def adversaries():
    """Generator and discriminator with an optimizer each."""
    torch.manual_seed(0)
    models = nn.Linear(16, 32), nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 1))
    return models, [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]


def train(rounds=3, critic=1, scaler=None, loud=1.0):
    """Every round `critic` steps of the discriminator and one of the generator."""
    (generator, discriminator), (of_generator, of_discriminator) = adversaries()
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)

    def step(loss, optimizer):
        scaler.scale(loss * loud).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(rounds):
        for _ in range(critic):
            step(discriminator(generator(torch.randn(8, 16)).detach()).square().mean() + 2.0, of_discriminator)
        step(discriminator(generator(torch.randn(8, 16))).square().mean(), of_generator)


def test_steps_of_two_optimizers_in_turns_say_whose_they_are(tmp_path):
    with followed(tmp_path, every=2) as (_, writer):
        train()
    # of the first step nobody knew yet that there would be another's
    assert writer.column("turn") == {2: 1, 3: 0, 4: 1, 5: 0, 6: 1}
    assert all((loss > 2.0) == (step % 2 == 1) for step, loss in writer.column("loss").items())


def test_turns_need_not_take_turns_evenly(tmp_path):
    with followed(tmp_path, every=2) as (_, writer):
        train(rounds=2, critic=3)
    assert writer.column("turn") == {4: 1, 5: 0, 6: 0, 7: 0, 8: 1}


def test_a_skipped_step_is_of_the_optimizer_that_skipped_it(tmp_path):
    with followed(tmp_path, every=2) as (_, writer):
        train(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**100), loud=1e30)
    assert writer.column("skipped") == dict.fromkeys(range(1, 7), 1)
    assert writer.column("turn") == {2: 1, 3: 0, 4: 1, 5: 0, 6: 1}


def test_one_optimizer_or_two_that_step_together_have_no_turns(tmp_path):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    with followed(tmp_path, every=2) as (_, writer):
        both = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        for _ in range(4):
            model(torch.randn(8, 16)).square().mean().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    assert len(writer.column("loss")) == 4
    assert writer.column("turn") == {}


def test_an_optimizer_made_anew_for_the_same_parameters_is_no_other(tmp_path):
    model = nn.Linear(16, 16)
    with followed(tmp_path, every=2) as (_, writer):
        for _ in range(4):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
    assert len(writer.column("loss")) == 4
    assert writer.column("turn") == {}


def test_ever_new_parameters_are_not_counted_for_ever():
    turns = Turns()
    found = [turns.of([(0, number)]) for number in range(3 * MOST)]
    assert found == [None, *range(1, MOST), *[None] * (2 * MOST)]
