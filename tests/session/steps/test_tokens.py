"""Tokens of a step, where there are any to be found."""

import pytest
import torch
from tests.session.inline import followed
from torch import nn

from narrowgauge.session.tensors.batches import Batches


class Own(nn.Module):
    """Makes its batch itself, unless it is given one."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x=None):
        return self.up(torch.ones(8, 16) if x is None else x)


def test_a_step_without_any_has_no_number_of_them(tmp_path):
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with followed(tmp_path) as (session, writer):
        session.optimizer_made(optimizer)
        for batch in ((), (), (torch.ones(4, 16),)):
            model(*batch).square().mean().backward()
            optimizer.step()
    assert len(writer.column("loss")) == 3
    assert writer.column("tokens") == {3: 4}
    assert list(writer.column("tokens_per_second")) == [3]


class Each(nn.Module):
    """Is given a list, of which it takes each by itself."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(16, 1)
        self.words = nn.Embedding(32, 16)

    def forward(self, batch, others=None):
        taken = [x if x.is_floating_point() else self.words(x) for x in (batch if isinstance(batch, list) else [batch])]
        return torch.cat([self.rows(x).flatten() for x in taken])


def ids(*shape):
    return torch.ones(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "counted", "tokens"),
    [
        ([torch.ones(3, 4, 16), torch.ones(3, 6, 16)], "samples", 2),
        ([torch.ones(3, 4, 16)] * 5, "samples", 5),
        ([ids(7), ids(4), ids(5)], "tokens", 16),
        ([ids(1, 7), ids(1, 4)], "tokens", 11),
        ([torch.ones(7, 16), torch.ones(4, 16), torch.ones(5, 16)], "samples", 3),
        ([torch.ones(4, 16), torch.ones(4, 16)], "samples", 4),  # two inputs of four rows each
        ([ids(2, 7), ids(2, 7)], "tokens", 14),
        ([torch.ones(8, 4, 16), torch.ones(8, 6, 16)], "samples", 8),  # two inputs of eight sequences each
        ([ids(8), ids(8)], "tokens", 8),  # two categories of eight rows each, or so
        (torch.ones(3, 4, 16), "samples", 3),
    ],
)
def test_a_list_of_one_sample_each_counts_them(tmp_path, batch, counted, tokens):
    model = Each()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    uneven = isinstance(batch, list) and batch[0].shape != batch[-1].shape
    beside = [{"labels": ids(2)} | ({"boxes": torch.ones(2, 4)} if counted == "samples" else {})]
    calls = [(batch,), (batch, beside)] if uneven else [(batch,)]  # else it may be several inputs
    with followed(tmp_path) as (session, writer):
        session.optimizer_made(optimizer)
        for given in calls:
            model(*given).square().mean().backward()
            optimizer.step()
        assert session.facts()["counted"] == counted
    assert list(writer.column("tokens").values()) == [tokens] * len(calls)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        (([ids(20), ids(17)], torch.ones(8, 13)), {}, 8),  # numbers beside a bag of categories
        (([ids(3), ids(4)],), {"input_ids": ids(2, 8)}, 16),
        ((), {"class_labels": [ids(3), ids(4)], "pixel_values": torch.ones(2, 3, 8, 8)}, 2),
        (([torch.ones(3, 4, 4, dtype=torch.bool)], torch.ones(8, 16)), {}, 8),
        (([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)] * 2,), {}, 2),
        ((object(), [torch.ones(3, 4, 4), torch.ones(3, 4, 5)]), {}, 2),  # behind a model, say
    ],
)
def test_a_list_that_is_something_else_does_not_count_as_samples(args, kwargs, tokens):
    assert Batches().see((args, kwargs)) == tokens


def test_a_list_of_what_a_model_made_is_no_data():
    batches, pictures = Batches(), [torch.ones(3, 4, 4), torch.ones(3, 5, 5)]
    batches.made(pictures)
    assert batches.see(((pictures, ids(2)), {})) == 0


class Layer(nn.Module):
    """Of a model that is never called itself."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, h, attention_mask, position_embeddings):
        cos, sin = position_embeddings
        return torch.softmax(h @ h.transpose(1, 2) + attention_mask, -1) @ self.up(h * cos + h * sin)


def test_masks_and_angles_of_layers_that_the_program_calls_itself_are_no_tokens(tmp_path):
    words, layers, head = nn.Embedding(32, 16), [Layer(), Layer()], nn.Linear(16, 32)
    optimizer = torch.optim.SGD([p for part in (words, *layers, head) for p in part.parameters()], lr=0.1)
    with followed(tmp_path) as (session, writer):
        session.optimizer_made(optimizer)
        for _ in range(3):
            h, mask, angles = words(ids(4, 8)), torch.zeros(4, 8, 8), (torch.rand(1, 8, 16), torch.rand(1, 8, 16))
            for layer in layers:
                h = h + layer(h, attention_mask=mask, position_embeddings=angles)
            head(h).square().mean().backward()
            optimizer.step()
    assert writer.column("tokens") == {1: 32, 2: 32, 3: 32}


class Values(nn.Module):
    """Of what is observed and done, one after the other; or of pictures, alone or in a list."""

    def __init__(self, first):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 16, 1))  # no layer that takes a sample
        self.first = first

    def forward(self, *given):
        x = given[0] if len(given) == 1 else torch.cat(given, -1)
        return self.first(x[0] if isinstance(x, list) else x) * self.scale.mean()


@pytest.mark.parametrize(
    ("first", "given", "samples"),
    [
        (nn.Linear(16, 4), (torch.ones(16),), 1),  # an observation
        (nn.Linear(16, 4), (torch.ones(12), torch.ones(4)), 1),  # and an action
        (nn.Conv2d(3, 4, 3), (torch.ones(3, 8, 8),), 1),
        (nn.LazyLinear(4), (torch.ones(16),), 1),
        (nn.LazyConv2d(4, 3), (torch.ones(3, 3, 8, 8),), 3),
        (nn.Conv2d(3, 4, 3), ([torch.ones(3, 8, 8)],), 1),  # a detector's batch of one
        (nn.ConvTranspose1d(6, 2, 3), (torch.ones(6, 9),), 1),
        (nn.Linear(16, 4), (torch.ones(16, 16),), 16),
        (nn.Conv2d(3, 4, 3), (torch.ones(3, 3, 8, 8),), 3),
        (nn.Sequential(nn.Unflatten(0, (8, 1)), nn.Linear(1, 4)), (torch.ones(8),), 8),  # of one number each
        (nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 4, 3)), (torch.ones(5, 8, 8),), 5),  # grey ones
    ],
)
def test_what_has_no_dimension_for_samples_is_one(tmp_path, first, given, samples):
    model = Values(first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with followed(tmp_path) as (session, writer):
        session.optimizer_made(optimizer)
        for microbatches in (1, 3):
            for _ in range(microbatches):
                model(*(x.copy() if isinstance(x, list) else x.clone() for x in given)).square().mean().backward()
            optimizer.step()
    assert writer.column("tokens") == {1: samples, 2: 3 * samples}
    assert session.facts()["counted"] == "samples"
