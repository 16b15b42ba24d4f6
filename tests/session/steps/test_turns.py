"""Programs that train in turns: each step says whose it is."""

import pytest
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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skips", [(0,), (1,), (0, 1)], ids=["the first", "the second", "both"])
def test_two_optimizers_under_one_scaler_make_one_step_whichever_it_skips(skips, fused, tmp_path):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    with followed(tmp_path, every=2) as (session, writer):
        both = [torch.optim.SGD(part.parameters(), lr=0.1, fused=fused) for part in model]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(1, 6):
            scaler.scale(model(torch.randn(8, 16)).square().mean()).backward()
            for number in skips if step in (2, 4) else ():
                model[number].weight.grad[0, 0] = float("inf")
            for optimizer in both:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
    assert len(writer.column("loss")) == 5
    assert writer.column("turn") == {}
    assert writer.column("skipped") == {2: 1, 4: 1}
    assert session.steps.ledger.rows.skipped_steps == 2
    assert session.steps.ledger.rows.nonfinite_steps == 0


@pytest.mark.parametrize("swaps", [True, False], ids=["swaps its groups", "freezes the rest"])
def test_one_optimizer_that_trains_block_by_block_has_no_turns(swaps, tmp_path):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    with followed(tmp_path, every=2) as (_, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(9):
            block = model[step % 3]
            if swaps:
                optimizer.param_groups[0]["params"] = list(block.parameters())
            else:
                model.requires_grad_(False)
                block.requires_grad_(True)
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    assert len(writer.column("loss")) == 9
    assert writer.column("turn") == {}


def test_optimizers_that_share_a_parameter_take_turns(tmp_path):
    trunk, heads = nn.Linear(16, 16), [nn.Linear(16, 1), nn.Linear(16, 2)]
    with followed(tmp_path, every=2) as (_, writer):
        both = [torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1) for head in heads]
        for step in range(4):
            heads[step % 2](trunk(torch.randn(8, 16))).square().mean().backward()
            both[step % 2].step()
            both[step % 2].zero_grad()
    assert writer.column("turn") == {2: 1, 3: 0, 4: 1}


def test_models_trained_one_after_another_have_a_number_each_though_the_last_is_freed(tmp_path):
    def train():
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with followed(tmp_path, every=2) as (_, writer):
        for _ in range(MOST + 3):
            train()
    assert len(writer.column("loss")) == 2 * (MOST + 3)
    assert list(writer.column("turn").values()) == [number for number in range(1, MOST) for _ in range(2)]
    assert min(writer.column("turn")) == 3


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
    found = [turns.of([number]) for number in range(3 * MOST)]
    assert found == [None, *range(1, MOST), *[None] * (2 * MOST)]


def test_of_what_was_freed_no_number_is_kept():
    turns = Turns()
    numbers = [turns.trainer(torch.optim.SGD([torch.ones(1)], lr=0.1)) for _ in range(500)]
    assert numbers == list(range(500))
    assert len(turns._trainers) + len(turns._of) < 100
