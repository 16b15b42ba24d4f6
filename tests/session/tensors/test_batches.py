"""What a model is called with, whatever holds it: counted and hashed."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from narrowgauge.session.tensors.batches import Batches
from narrowgauge.session.tensors.fingerprint import chain


@dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor


class Closed:
    def __init__(self, **held):
        self.held = held


def seen(inputs):
    batches = Batches()
    return batches.see(inputs), int(batches.digest)


@pytest.mark.parametrize("kind", [dict, Batch, UserDict])
def test_a_batch_is_found_in_what_holds_it(kind):
    held = {"ids": torch.arange(24).view(3, 8), "mask": torch.ones(3, 8)}
    assert seen(((kind(**held),), {})) == seen(((held,), {}))
    assert seen(((), {"batch": kind(**held)}))[0] == 24
    other = kind(ids=held["ids"] + 1, mask=held["mask"])
    assert seen(((other,), {}))[1] != seen(((held,), {}))[1]


IDS, ENDS, ROWS = torch.arange(512), torch.tensor([0, 200, 512]), torch.rand(64, 8)


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ((IDS.view(4, 128), torch.ones(4, 128)), 512),
        ((ENDS, IDS.view(4, 128)), 512),
        ((ENDS, IDS), 512),  # packed texts
        ((IDS, ENDS), 512),
        ((ROWS, torch.tensor([0, 16, 32, 64])), 64),  # samples, and where groups of them begin
        ((ROWS, torch.arange(64)), 64),  # time steps
        ((torch.randint(256, (6, 3, 9, 9), dtype=torch.uint8),), 6),
        ((torch.randint(256, (6, 9), dtype=torch.uint8),), 54),  # bytes of a text
        ((torch.tensor(3), IDS), 512),
    ],
)
def test_tokens_are_ids_in_rows_or_packed_and_else_samples(inputs, tokens):
    assert Batches().see((inputs, {})) == tokens


@pytest.mark.parametrize(
    ("inputs", "counted"),
    [
        ([IDS.view(4, 128)], "tokens"),
        ([IDS], "tokens"),
        ([ROWS], "samples"),
        ([torch.rand(4, 9, 8)], "samples"),
        ([torch.randint(256, (6, 3, 9, 9), dtype=torch.uint8)], "samples"),
        ([ROWS, IDS.view(4, 128)], "tokens and samples"),
    ],
)
def test_what_was_counted_is_known(inputs, counted):
    batches = Batches()
    assert batches.facts() == {}
    for x in inputs:
        batches.see(((x,), {}))
    assert batches.facts() == {"counted": counted}


def test_what_holds_its_tensors_otherwise_is_told():
    batches = Batches()
    assert batches.see(((Closed(ids=torch.arange(4)), None, "text"), {})) == 0
    assert batches.notes == ["Some inputs are objects (Closed), whose tensors are not found: they count no tokens."]


def test_a_batch_that_wants_a_gradient_is_counted_and_not_hashed():
    batches = Batches()
    x = torch.rand(5, 2, requires_grad=True)
    assert batches.see(((x,), {})) == 5
    assert batches.digest is None
    assert batches.see(((x, torch.arange(3)), {})) == 3  # what is data goes first, and a batch that moves is none
    assert batches.see(((x * 2,), {})) == 0  # made of it
    assert batches.see(((nn.Parameter(torch.ones(7, 2)),), {})) == 0
    assert batches.notes == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_counted_and_not_hashed(layout):
    batches = Batches()
    pieces = torch.arange(3), torch.arange(5)
    assert batches.see(((torch.nested.nested_tensor([x[:, None] * 1.0 for x in pieces], layout=layout),), {})) == 2
    assert batches.see(((torch.nested.nested_tensor([*pieces], layout=layout),), {})) == 3 + 5
    assert batches.digest is None
    [note] = batches.notes
    assert note.startswith("Some inputs are nested tensors, which are not hashed")


def test_what_is_given_twice_is_hashed_twice_and_what_a_model_made_not_at_all():
    x, y = torch.arange(6), torch.arange(6) + 1
    twice, made = Batches(), Batches()
    assert twice.see(((x, [x, None], {"more": y}), {})) == 6
    assert int(twice.digest) == int(chain([x, x, y]))
    made.made({"picture": x})
    assert made.see(((x.view(2, 3), y),), more=True) == 6
    assert int(made.digest) == int(chain([y]))
    assert made.again([x])
    assert not made.again([y.clone()])


class Pair(NamedTuple):
    ids: torch.Tensor
    more: torch.Tensor


def test_containers_are_searched_in_the_order_of_torch():
    a, b, c = torch.arange(3), torch.arange(4), torch.arange(5)
    batches = Batches()
    batches.see((({"z": a, "b": [OrderedDict(y=b), Pair(c, a)]}, 7, "text"), {"last": b}))
    assert int(batches.digest) == int(chain([a, b, c, a, b]))
