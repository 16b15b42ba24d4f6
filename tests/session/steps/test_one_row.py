"""One number that a model returns for one row (a prediction, a value) is not an evaluation's loss."""

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from torch import nn

from narrowgauge.session.steps.returned import ReturnedLosses

X = torch.randn(17, 6, generator=torch.Generator().manual_seed(0))
TARGETS = X.sum(1) + 10


class Squeezed(nn.Module):
    """Returns a number without a dimension for one row."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x):
        return self.layer(x).squeeze()


class Valued(nn.Module):
    """Returns what an agent might do, and one value for each observation."""

    def __init__(self):
        super().__init__()
        self.layer, self.value = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        return self.layer(x).softmax(-1), self.value(x)


class OneLoss(nn.Module):
    """Returns a loss that torch has no function for, in a dimension of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x):
        return (self.layer(x) - 1).square().mean().reshape(1)


def flat():
    return nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))


@pytest.mark.parametrize(
    ("make", "rows"),
    [(lambda: nn.Linear(6, 1), 1), (lambda: nn.Linear(6, 1), 16), (flat, 1), (flat, 16), (Squeezed, 16)],
)
def test_an_evaluations_batch_of_one_row_has_a_loss_as_the_others(tmp_path, make, rows):
    expected, model = [], make()
    with followed(tmp_path) as (session, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(3):
            x = X[step : step + rows]
            F.mse_loss(model(x).flatten(), TARGETS[step : step + rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found = [F.mse_loss(model(x).flatten(), y) for x, y in zip(X.split(8), TARGETS.split(8), strict=True)]
            expected.append(float(torch.stack(found).mean()))
    assert list(writer.column("eval_loss").values()) == pytest.approx(expected)
    assert session.steps.evals.notes == []


def by_rows(model):
    return (model(X)[1].squeeze(1) - TARGETS).square().mean()


def row_by_row(model):
    """Values and what was done are made of the same calls."""
    calls = [model(x) for x in X[:3]]
    return torch.stack([F.smooth_l1_loss(value, torch.ones(1)) - p[0].log() for p, value in calls]).sum()


@pytest.mark.parametrize("loss", [by_rows, row_by_row])
def test_a_value_of_one_observation_is_no_evaluation(tmp_path, loss):
    model = Valued()
    with followed(tmp_path) as (session, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(X[0])
    assert not writer.column("eval_loss")
    assert session.steps.evals.notes == [
        "3 numbers that a model's call without gradients returned beside other things are not the whole of what "
        "backward was called on; eval_loss leaves them out."
    ]


def test_nor_is_that_of_a_critic_beside_an_actor(tmp_path):
    actor, critic = nn.Linear(6, 3), nn.Linear(6, 1)
    with followed(tmp_path) as (session, writer):
        optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.01)
        for _ in range(3):
            (by_rows(lambda x: (None, critic(x))) - actor(X).log_softmax(-1)[:, 0].mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                critic(X[0])
    assert not writer.column("eval_loss")
    assert session.steps.evals.notes == [
        "3 numbers that a model's call without gradients returned are not what backward was called on (what it "
        "predicts for one row, say); eval_loss leaves them out."
    ]


@pytest.mark.parametrize("calls", [1, 2])
def test_a_loss_that_has_a_dimension_is_one_if_the_program_trains_by_it(tmp_path, calls):
    expected, model = [], OneLoss()
    with followed(tmp_path) as (session, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            sum(model(X + call) for call in range(calls)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                expected.append(float(model(X)))
    assert list(writer.column("eval_loss").values()) == expected
    assert session.steps.evals.notes == []


def test_what_is_known_to_be_apart():
    x = torch.ones(2, requires_grad=True)
    for made, others, expected in (
        ([], False, False),
        ([None], False, True),
        ([None], True, True),
        ([None, None], False, True),
        ([x.sum(), x.sum()], True, False),
        ([x.sum(), None], False, False),  # the first is all that is asked for, and the loss is made of it
    ):
        found = ReturnedLosses()
        for each in made:
            found.returned(each)
        if others:
            found.passed()
        else:
            found.backward(made[0] * 2 if made and made[0] is not None else x.sum())
        assert (found.apart, found.otherwise) == (expected, False)
