"""Evaluations whose losses nobody hears: computed by hand, of what the model returned."""

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.utils.data import DataLoader

TOLD = (
    "{} calls of models in evaluations, on batches of data loaders, had no loss that is heard (they returned none, and "
    "none of torch's loss functions was called on what they did): eval_loss has nothing of what the program computes "
    "by hand, or in a compiled graph."
)


def by_hand(model, x):
    """As a label smoother or a preference's loss is computed."""
    return -torch.log_softmax(model(x), dim=-1).mean()


def notes_of(tmp_path, between, *, steps=3, beside=lambda model, x: None):
    """Of a program that calls `between(model, loader)` after each step, and `beside(model, x)` beside each forward."""
    with followed(tmp_path) as (session, writer):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.randn(6, 4), batch_size=2)
        for x in DataLoader(torch.randn(2 * steps, 4), batch_size=2):
            loss = by_hand(model.train(), x)
            with torch.no_grad():
                beside(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                between(model.eval(), loader)
    assert not session.hearing.notes
    return session.steps.evals.notes, writer.column("eval_loss")


def nothing(model, loader):
    pass


def prefetched(loader):
    """As accelerate gives batches: the next one is there before the program has this one."""
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


@pytest.mark.parametrize("batches", [iter, prefetched])
def test_a_loss_that_is_computed_by_hand_is_told_to_be_none(tmp_path, batches):
    def evaluate(model, loader):
        for x in batches(loader):
            by_hand(model, x)

    assert notes_of(tmp_path, evaluate) == ([TOLD.format(9)], {})


def test_where_torchs_loss_function_is_called_beside_it_nothing_lacks(tmp_path):
    def evaluate(model, loader):
        for x in loader:
            by_hand(model, x)
            nn.functional.mse_loss(model(x), x)

    notes, found = notes_of(tmp_path, evaluate)
    assert notes == []
    assert len(found) == 3


def test_one_that_is_told_otherwise_is_told_once(tmp_path):
    def evaluate(model, loader):
        for x in loader:
            nn.functional.mse_loss(model(x), x, reduction="none")

    notes, _ = notes_of(tmp_path, evaluate)
    assert [note.partition(" were ")[0] for note in notes] == ["9 losses of evaluations"]


class Returns(nn.Linear):
    """What its call returns is the loss, made by hand."""

    def forward(self, x):
        return by_hand(super().forward, x)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["itself", "wrapped"])
@pytest.mark.parametrize("kind", [Returns, nn.Linear])
def test_what_the_models_call_returns_is_heard(tmp_path, kind, wrap):
    with followed(tmp_path) as (session, writer):
        model = kind(4, 4)
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped(torch.randn(2, 4)).mean().backward()
        optimizer.step()
        model.eval()  # not what wraps it
        with torch.no_grad():
            for x in DataLoader(torch.randn(6, 4), batch_size=2):
                model(x)
    returns = kind is Returns
    assert (session.steps.evals.notes, list(writer.column("eval_loss"))) == (
        ([], [1]) if returns else ([TOLD.format(3)], [])
    )


def generates(model, loader):
    x = torch.ones(1, 4)
    for _ in range(5):
        x = model(x)


def updates_statistics(model, loader):
    model.train()
    for x in loader:
        model(x)


@pytest.mark.parametrize("between", [nothing, generates, updates_statistics])
def test_samples_between_steps_are_no_evaluation(tmp_path, between):
    assert notes_of(tmp_path, between) == ([], {})


def refers(model, x):
    model.eval()(x)
    model.train()


def test_a_reference_beside_a_batch_that_trains_is_no_evaluation(tmp_path):
    assert notes_of(tmp_path, nothing, beside=refers) == ([], {})


def test_references_between_microbatches_are_no_evaluation(tmp_path):
    with followed(tmp_path) as (session, _):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, x in enumerate(DataLoader(torch.randn(16, 4), batch_size=2)):
            with torch.no_grad():
                model.eval()(x)
            by_hand(model.train(), x).backward()
            with torch.no_grad():
                model.eval()(x)
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert session.steps.evals.notes == []


def test_the_last_evaluation_is_told_though_nothing_follows(tmp_path):
    def evaluate(model, loader):
        for x in loader:
            by_hand(model, x)

    assert notes_of(tmp_path, evaluate, steps=1) == ([TOLD.format(3)], {})


def test_a_teachers_call_behind_an_evaluation_is_none_of_it(tmp_path):
    """It was trained before, and is asked about the first batch that its pupil learns from."""
    with followed(tmp_path) as (session, _):
        teacher, pupil = nn.Linear(4, 4), nn.Linear(4, 4)
        for model in (teacher, pupil):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in DataLoader(torch.randn(6, 4), batch_size=2):
                with torch.no_grad():
                    y = teacher(x) if model is pupil else x
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for x in DataLoader(torch.randn(6, 4), batch_size=2):
                    by_hand(model.eval(), x)
    assert session.steps.evals.notes == [TOLD.format(6)]
