"""What a model's call returns is an evaluation's loss wherever the program trains by it, whatever is done around it."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from torch import nn

from narrowgauge.session.steps import returned
from narrowgauge.session.steps.returned import MOST_NODES, ReturnedLosses

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class ByHand(nn.Module):
    """Returns a loss that torch has no function for, beside what it is made of."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        found = self.layer(x)
        return found, (found - 1).pow(2).mean()


class Between(ByHand):
    """Returns it between others."""

    def forward(self, x):
        found, loss = super().forward(x)
        return found, loss, found.square()


class Scaled(nn.Module):
    """Returns a temperature beside features; both are of one node when it is compiled."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x), self.scale.exp()


def trained(model, loss, steps=3, evaluate=lambda model: model(X)[1]):
    """Train by `loss`; what is evaluated after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(float(evaluate(model)))
    return found


def penalized(model):
    return model(X)[1] / 2 + 0.01 * sum(p.abs().sum() for p in model.parameters())


def in_a_thread(model):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(model, X).result()[1]


def hooked(model):
    model.register_full_backward_hook(lambda *_: None)
    return model


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (ByHand, penalized),
        (ByHand, lambda model: torch.amp.GradScaler("cpu").scale(penalized(model))),
        (ByHand, in_a_thread),
        (lambda: hooked(ByHand()), lambda model: model(X)[1]),
        (lambda: hooked(Between()), lambda model: model(X)[1]),
        (lambda: nn.DataParallel(ByHand()), lambda model: model(X)[1].mean()),
    ],
)
def test_a_loss_that_a_program_trains_by_is_an_evaluations(tmp_path, make, loss):
    with followed(tmp_path) as (session, writer):
        expected = trained(make(), loss)
    assert list(writer.column("eval_loss").values()) == expected
    assert not session.steps.evals.notes + session.hearing.notes


def by_two(model):
    """Where it is."""
    loss = model(X)[1]
    loss *= 2
    return loss


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (by_two, True),
        (lambda model: 2 * model(X)[1], True),
        (lambda model: torch.amp.GradScaler("cpu").scale(2 * model(X)[1]), True),
        (lambda model: torch.amp.GradScaler("cpu", init_scale=2.0).scale(model(X)[1]), False),
        (penalized, False),
        (lambda model: model(X)[1], False),
    ],
)
def test_one_that_each_of_two_ranks_multiplies_by_two_is_told(tmp_path, monkeypatch, loss, told):
    monkeypatch.setattr(returned, "_ranks", lambda: 2)
    with followed(tmp_path) as (session, writer):
        expected = trained(ByHand(), loss)
    assert list(writer.column("eval_loss").values()) == expected
    note = "3 of 3 losses of evaluations are what the model's call returned, which the program multiplies by 2, the "
    note += "number of its ranks, before backward: eval_loss is without that."
    assert session.steps.evals.notes == ([note] if told else [])


class Spread(torch.Tensor):
    """As one that lies on several ranks, of which a number is a collective."""

    read = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.read += function in (torch.Tensor.__float__, torch.Tensor.item, torch.Tensor.clone)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_nobody_reads_a_loss_that_is_spread_over_ranks(monkeypatch):
    monkeypatch.setattr(returned, "_ranks", lambda: 2)
    losses, weight = returned.ReturnedLosses(), torch.ones((), requires_grad=True)
    loss = (weight * 3).as_subclass(Spread)
    losses.returned(loss)
    losses.backward(2 * loss)
    assert (losses.whole, losses.compared, losses.by_ranks, Spread.read) == (True, False, 1, 0)
    plain = weight * 3
    losses.returned(plain)
    losses.backward(2 * plain)
    assert (losses.compared, losses.by_ranks) == (True, 2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model: penalized(model) + 0.1 * model.features.square().mean(),
        lambda model: penalized(model) + 0.1 * model.features.square().mean() + model.features.mean(),
    ],
)
def test_one_that_it_trains_by_beside_others_that_the_call_computed_is_not(tmp_path, loss):
    model = ByHand()
    model.register_forward_hook(lambda model, _, output: setattr(model, "features", output[0]))
    with followed(tmp_path) as (session, writer):
        trained(model, loss)
    assert not writer.column("eval_loss")
    assert session.steps.evals.notes == [
        "3 numbers that a model's call without gradients returned beside other things are not the whole of what "
        "backward was called on; eval_loss leaves them out."
    ]


def test_a_compiled_models_outputs_are_told_apart(tmp_path):
    with followed(tmp_path, compiling=True) as (session, writer):
        trained(
            torch.compile(Scaled(), backend="aot_eager"),
            lambda model: F.cross_entropy(model(X)[0], torch.arange(8)),
        )
    assert not writer.column("eval_loss")
    (note,) = session.steps.evals.notes
    assert note.startswith("3 numbers that a model's call without gradients returned beside other things")


class Named(NamedTuple):
    features: torch.Tensor
    loss: torch.Tensor


@dataclass(slots=True)
class Slotted:
    features: torch.Tensor
    loss: torch.Tensor


AROUND = [
    tuple,
    lambda output: {"loss": output[1], "features": output[0]},
    lambda output: Named(*output),
    lambda output: Slotted(*output),
]


@pytest.mark.parametrize("around", AROUND)
def test_a_metric_of_what_is_returned_beside_the_loss_is_none(tmp_path, around):
    class Model(ByHand):
        def forward(self, x):
            return around(super().forward(x))

    def loss(model):
        found = model(X)
        return found["loss"] if isinstance(found, dict) else (found[1] if type(found) is tuple else found.loss)

    def evaluate(model):
        found = loss(model)
        F.l1_loss(X, torch.zeros_like(X))
        return found

    with followed(tmp_path) as (session, writer):
        expected = trained(Model(), loss, evaluate=evaluate)
    assert list(writer.column("eval_loss").values()) == expected
    (note,) = session.steps.evals.notes
    assert note.startswith("3 losses were computed without gradients when a model's call had returned the one")


def test_a_model_that_is_trained_after_another_is_asked_of_its_own(tmp_path):
    with followed(tmp_path) as (session, writer):
        trained(Scaled(), lambda model: F.cross_entropy(model(X)[0], torch.arange(8)), steps=18)
        expected = trained(ByHand(), lambda model: model(X)[1])
    assert list(writer.column("eval_loss").values()) == expected
    assert not session.hearing.notes


def student(model):
    return F.cross_entropy(model(X)[0], torch.arange(8))


@pytest.mark.parametrize("turns", [False, True])
def test_each_of_two_models_is_asked_of_its_own(tmp_path, turns):
    """One returns the loss that it is trained by, the other a temperature."""
    with followed(tmp_path) as (session, writer):
        teacher, other, expected = ByHand(), Scaled(), []
        for rounds in (1, 1, 1) if turns else (3,):
            expected += trained(teacher, lambda model: model(X)[1], steps=rounds)
            trained(other, student, steps=rounds)
    assert list(writer.column("eval_loss").values()) == expected
    told = "3 numbers that a model's call without gradients returned beside other things are not the whole of what "
    assert [note.startswith(told) for note in session.steps.evals.notes] == [True]
    assert not session.hearing.notes


def test_what_was_evaluated_of_a_model_that_is_gone_is_told(tmp_path):
    with followed(tmp_path) as (session, _):
        model = ByHand()
        model.register_forward_hook(lambda model, _, output: {"features": output[0], "loss": output[1]})
        trained(model, lambda model: model(X)["features"].square().mean(), evaluate=lambda model: model(X)["loss"])
        del model
        gc.collect()
        trained(ByHand(), lambda model: model(X)[1])
    (note,) = session.steps.evals.notes
    assert note.startswith("3 of 6 losses of evaluations are what the model's call returned, which backward was not")


def test_nothing_is_told_of_a_graph_that_is_too_large():
    found, x = ReturnedLosses(), torch.ones(2, requires_grad=True)
    loss = (x * 2).sum()
    found.returned(loss)
    rest = x.sum()
    for _ in range(MOST_NODES):
        rest = rest * 1
    found.backward(loss + rest)
    assert not found.whole
    assert not found.otherwise


def leaf():
    return torch.ones(2, requires_grad=True)


def told(found):
    if found.whole:
        return "whole"
    return ("in part" if found.partly else "not") if found.otherwise else "nothing"


def test_it_asks_in_the_first_passes_and_then_in_one_of_sixteen():
    found = ReturnedLosses()
    for _ in range(2):
        asked = []
        for at in range(40):
            asked += [at] * found.asks
            found.backward(leaf().sum())
        assert asked == [*range(16), 16, 32]
        found.training_changed()
    loss = leaf().sum()
    found.returned(loss)
    found.backward(loss)
    assert (told(found), found.asks) == ("whole", False)


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        (lambda loss, x: loss, "whole"),
        (lambda loss, x: (loss,), "whole"),
        (lambda loss, x: (x * 3).sum(), "not"),  # nothing of the call's
        (lambda loss, x: [loss, x[0]], "in part"),
        (lambda loss, x: [loss, x], "nothing"),  # a leaf has no node
        (lambda loss, x: [loss, torch.autograd.graph.get_gradient_edge(loss)], "nothing"),
        (lambda loss, x: [], "nothing"),
    ],
)
def test_what_backward_is_called_on(backward, expected):
    found, x = ReturnedLosses(), leaf()
    loss = (x * 2).sum()
    found.returned(loss)
    found.backward(backward(loss, x))
    assert told(found) == expected


@pytest.mark.parametrize("other", [None, torch.tensor(1.0), leaf().sum()])
@pytest.mark.parametrize("order", [1, -1])
def test_nothing_is_told_of_one_of_two_calls(other, order):
    found, loss = ReturnedLosses(), leaf().sum()
    for each in (other, loss)[::order]:
        found.returned(each)
    found.backward(loss)
    assert told(found) == "nothing"


def test_nothing_is_told_of_what_another_thread_made():
    found, x = ReturnedLosses(), leaf()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: found.returned((x * 2).sum())).result()
    found.backward((x * 3).sum())
    assert told(found) == "nothing"


def test_a_loss_that_is_the_first_thing_that_a_thread_computes():
    def train():
        loss = leaf().sum()
        found.returned(loss)
        found.backward(loss / 4)
        return loss.grad_fn._sequence_nr()

    found = ReturnedLosses()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train).result() == 0
    assert told(found) == "whole"


def test_what_a_large_model_computed_before_its_loss_is_not_gone_through():
    found, y = ReturnedLosses(), leaf()
    for _ in range(MOST_NODES):
        y = y * 1
    found.returned(y.sum())
    found.backward(y.square().mean())
    assert told(found) == "not"


def test_what_the_call_made_of_the_loss_that_it_returned_has_it_in_part():
    found, x = ReturnedLosses(), leaf()
    loss = (x * 2).sum()
    total = loss + x.sum()
    found.returned(loss)
    found.backward(total)
    assert told(found) == "in part"


@pytest.mark.parametrize("beyond", [0, 1])
def test_so_many_nodes_are_gone_through(beyond):
    found, loss, rest = ReturnedLosses(), leaf().sum(), leaf()
    found.returned(loss)
    for _ in range(MOST_NODES - 5 + beyond):
        rest = rest * 1
    found.backward(loss + rest.sum())  # beside them: an addition, the loss, a sum, a leaf
    assert told(found) == ("nothing" if beyond else "whole")
