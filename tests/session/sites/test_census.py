"""Models that follow each other (folds, trials of a search, clients): the next one lies where the last one did."""

from torch import nn

from narrowgauge.session.sites.census import Census


class Observer:
    """Knows no other names."""


def made(census, *parts):
    model = nn.Sequential(*parts)
    census.add(model, Observer())
    return model


def test_a_model_at_the_address_of_one_that_was_seen_was_not_seen_itself():
    census = Census()
    for n in range(40):  # sooner or later one lies where another did
        model = made(census, nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
        if n % 2:
            census.saw(model[0], "weight")
            census.saw(model[1], "weight")
        del model
    assert census.unseen() == "Linear (40 of them, 50.0% of all parameters: '0', '1')"


def part_of(n):
    return nn.Embedding(4, 4) if n % 2 else nn.Linear(4, 4, bias=False)


def test_another_kind_at_that_address_is_named():
    census = Census()
    for n in range(40):
        model = made(census, part_of(n))
        if n % 2 == 0:
            census.saw(model[0], "weight")
        del model
    assert census.unseen() == "Embedding (20 of them, 50.0% of all parameters, looked up, not multiplied)"


def test_what_is_gone_is_not_looked_for_and_not_kept():
    census = Census()
    for _ in range(40):
        model = made(census, nn.Linear(4, 4))
    assert census.lacks()
    census.saw(model[0], "weight")
    assert not census.lacks()  # of those that are gone nobody can see a weight any more
    assert len(census._noted) == 2
    assert census.unseen() == "Linear (39 of them, 78.0% of all parameters: '0')"


def test_a_shared_part_outlives_the_model_in_which_it_was_seen():
    shared = nn.Linear(4, 4, bias=False)
    tied = nn.Linear(4, 4, bias=False)
    tied.weight = shared.weight
    census = Census()
    first, _second = made(census, tied), made(census, shared)
    census.saw(first[0], "weight")
    del first, tied
    _third = made(census, nn.Embedding(4, 4))
    assert census.unseen() == "Embedding (1 of them, 50.0% of all parameters, looked up, not multiplied)"


def test_vectors_that_are_multiplied_count_by_their_own_model():
    census = Census()
    for n in range(20):
        model = made(census, nn.LayerNorm(4, bias=False))
        if n % 2:
            census.vector(model[0].weight)
        del model
    assert census.unseen() == "LayerNorm (10 of them, 50.0% of all parameters: '0')"


def test_totals_are_of_all_models():
    census = Census()
    model = made(census, nn.Linear(4, 4), nn.LayerNorm(4))
    census.saw(model[0], "weight")
    assert census.unseen() == ""
    del model
    _model = made(census, nn.Linear(4, 4, bias=False))
    assert census.unseen() == "Linear (1 of them, 36.4% of all parameters: '0')"


def test_what_multiplies_inside_one_kernel_is_counted_with_its_share():
    census = Census()
    cell, lstm, out = nn.GRUCell(4, 4, bias=False), nn.LSTM(4, 4, 2, bias=False), nn.Linear(4, 4, bias=False)
    model = made(census, cell, lstm, out)
    assert census.recurrent == {"LSTM": (1, 256 / 368), "GRUCell": (1, 96 / 368)}
    del model, lstm
    assert census.recurrent["LSTM"] == (1, 256 / 368)
