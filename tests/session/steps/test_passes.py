"""Evaluations that leave a data loader before its end, as Lightning does, which knows how long each is."""

import itertools

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch.utils.data import DataLoader

from narrowgauge.session.steps.passes import MOST_OPEN, Passes

TOLD = "Evaluations took up to {} passes over data loaders between two steps: eval_loss is the mean over all of them."


def notes_of(tmp_path, evaluate):
    """Of a program that evaluates after each of three steps, whose batches come of a loader too."""
    with followed(tmp_path) as (session, _):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(x):
            with torch.no_grad():
                nn.functional.mse_loss(model(x), x)

        for x in DataLoader(torch.randn(6, 4), batch_size=2):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            evaluate(loss)
    assert not session.hearing.notes
    return session.steps.evals.notes


def known_length(loader, count=None):
    """Its first batches, or as many as it has; nobody asks it for one more."""
    batches = iter(loader)
    return (next(batches) for _ in range(count or len(loader)))


@pytest.mark.parametrize("sizes", [(2,), (2, 3), (6, 6, 6), (2, 6, 2)])
def test_several_loaders_are_several_passes(tmp_path, sizes):
    loaders = [DataLoader(torch.randn(6, 4), batch_size=size) for size in sizes]

    def evaluate(loss):
        for loader in loaders:
            for x in known_length(loader):
                loss(x)

    assert notes_of(tmp_path, evaluate) == ([TOLD.format(len(sizes))] if len(sizes) > 1 else [])


def test_one_loader_that_is_left_early_and_begun_again_is_so_too(tmp_path):
    loader = DataLoader(torch.randn(6, 4), batch_size=2)

    def evaluate(loss):
        for _ in range(2):
            for x in known_length(loader, 2):
                loss(x)

    assert notes_of(tmp_path, evaluate) == [TOLD.format(2)]


def test_loaders_side_by_side_are_one_pass(tmp_path):
    loaders = [DataLoader(torch.randn(6, 4), batch_size=2) for _ in range(2)]

    def evaluate(loss):
        for x, y in zip(*map(known_length, loaders), strict=True):
            loss(x + y)

    assert notes_of(tmp_path, evaluate) == []


def each_time(loader):
    """Its first batch, of a new iterator each time."""
    while True:
        yield next(iter(loader))


BESIDE = {
    "begun anew": lambda long, one: ((x, y) for x in long for y in one),
    "asked anew": lambda long, one: zip(long, each_time(one), strict=False),
    "asked anew, of known length": lambda long, one: zip(known_length(long), each_time(one), strict=False),
    "first": lambda long, one: ((x, y) for y, x in zip(each_time(one), known_length(long), strict=False)),
    "repeated": lambda long, one: zip(long, itertools.cycle(one), strict=False),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("pairs", BESIDE.values(), ids=BESIDE)
def test_a_loader_of_one_batch_beside_another_is_no_pass_of_its_own(tmp_path, pairs, times):
    longs = [DataLoader(torch.randn(6, 4), batch_size=2) for _ in range(times)]
    one = DataLoader(torch.randn(2, 4), batch_size=2)

    def evaluate(loss):
        for long in longs:
            for x, y in pairs(long, one):
                loss(x + y)

    assert notes_of(tmp_path, evaluate) == ([TOLD.format(2)] if times > 1 else [])


def test_a_loader_within_another_is_in_its_pass(tmp_path):
    outer, inner = (DataLoader(torch.randn(6, 4), batch_size=2) for _ in range(2))

    def evaluate(loss):
        for x in outer:
            for y in inner:
                loss(x + y)

    assert notes_of(tmp_path, evaluate) == []


def test_losses_of_each_of_two_that_take_turns_are_two_passes(tmp_path):
    long, one = (DataLoader(torch.randn(size, 4), batch_size=2) for size in (6, 2))

    def evaluate(loss):
        for x in long:
            loss(x)
            loss(next(iter(one)))

    assert notes_of(tmp_path, evaluate) == [TOLD.format(2)]


def test_passes_stay_counted_when_the_training_goes_on(tmp_path):
    loaders = [DataLoader(torch.randn(6, 4), batch_size=2) for _ in range(2)]
    with followed(tmp_path) as (session, _):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(x):
            with torch.no_grad():
                nn.functional.mse_loss(model(x), x)

        for x in DataLoader(torch.randn(6, 4), batch_size=2):
            loss(x)  # no other step since the passes
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for y in itertools.chain(*loaders):
                loss(y)
            loaders = []  # or the last one would have none of it
    assert session.steps.evals.notes == [TOLD.format(2)]


def test_an_iterator_at_the_address_of_one_that_was_left_is_another():
    passes = Passes()
    for _ in range(2):
        for first in (True, False):
            passes.came(1, 7, first=first)
            passes.loss(begins=False)
    passes.over()
    assert passes.most == 2


def test_so_many_iterators_are_known():
    passes = Passes()
    for iterator in range(3 * MOST_OPEN):
        passes.came(1, iterator, first=True)
    assert len(passes._open) == MOST_OPEN + 1


def test_a_loader_that_is_asked_for_one_batch_each_time_is_none(tmp_path):
    loader = DataLoader(torch.randn(6, 4), batch_size=2, shuffle=True)

    def evaluate(loss):
        for _ in range(5):
            loss(next(iter(loader)))

    assert notes_of(tmp_path, evaluate) == []


def test_a_loss_of_a_batch_that_is_trained_next_is_no_pass_of_the_evaluation_after_it(tmp_path):
    loader = DataLoader(torch.randn(6, 4), batch_size=2)
    with followed(tmp_path) as (session, _):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, x in enumerate(DataLoader(torch.randn(8, 4), batch_size=2)):
            with torch.no_grad():
                nn.functional.mse_loss(model(x), x)
            model(x).square().sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        for y in known_length(loader):
            with torch.no_grad():
                nn.functional.mse_loss(model(y), y)
    assert session.steps.evals.notes == []
