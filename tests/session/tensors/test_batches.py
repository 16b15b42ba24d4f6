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


def ids(*shape):
    return torch.randint(8, shape)


BESIDE_IDS = {  # 4 texts of 6
    "mask": (ids(4, 6), torch.ones(4, 6)),
    "mask first, by its name": {"attention_mask": torch.ones(4, 6), "text": ids(4, 6)},
    "causal mask": (ids(4, 6), torch.ones(6, 6)),
    "mask of heads": (ids(4, 6), torch.ones(4, 1, 6, 6)),
    "time before batch": (ids(6, 4), torch.ones(6, 6), torch.ones(4, 6)),
    "rewards": (ids(4, 6), torch.ones(4)),
    "states": (torch.rand(4, 9, 5), ids(4, 6)),
    "last state": (ids(4, 6), (torch.rand(1, 4, 9), torch.rand(1, 4, 9))),
    "pictures": (torch.rand(4, 3, 8, 8), ids(4, 6)),
    "pictures in bytes": (torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8), ids(4, 6)),
    "patches": {"pixel_values": torch.rand(50, 12), "grid": ids(2, 3), "input_ids": ids(4, 6), "labels": ids(4, 6)},
    "more pictures than texts": {"input_ids": ids(4, 6), "pixel_values": torch.rand(7, 3, 8, 8)},
    "numbers": {"numbers": torch.rand(4, 3), "batch": {"input_ids": ids(4, 6)}},
    "embedded": {"inputs_embeds": torch.rand(4, 6, 5), "attention_mask": ids(4, 6), "labels": ids(4, 6)},
    "embedded by a model": {"inputs_embeds": torch.rand(4, 6, 5, requires_grad=True) * 2, "attention_mask": ids(4, 6)},
    "labels first": {"labels": ids(4, 9), "mask": ids(4, 9), "x": ids(4, 6)},
    "labels alone": {"labels": ids(4, 6)},
}
NO_IDS = {  # 4 samples
    "edges": (torch.rand(4, 5), ids(2, 9)),
    "edges first": (ids(2, 9), torch.rand(4, 5)),
    "edges with attributes": {"x": torch.rand(4, 5), "edge_index": ids(2, 9), "edge_attr": torch.rand(9, 3)},
    "categories": (torch.rand(4, 5), ids(4, 3)),
    "categories first": (ids(4, 3), torch.rand(4, 5)),
    "as many categories as numbers": (torch.rand(4, 5), ids(4, 5)),
    "classes of pixels": (torch.rand(4, 3, 8, 8), ids(4, 8, 8)),
    "classes of pixels in bytes": (torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8), ids(4, 8, 8)),
    "labels of pixels": {"labels": ids(4, 8, 8), "pixel_values": torch.rand(4, 3, 8, 8)},
    "labels of frames": {"input_features": torch.rand(4, 9, 6), "labels": ids(4, 7)},
    "classes of frames": (torch.rand(4, 6, 9), ids(4, 6)),
    "classes of frames, channels first": (torch.rand(4, 9, 6), ids(4, 6)),
    "sound": {"input_values": torch.rand(4, 60), "attention_mask": ids(4, 60)},
    "complex": (torch.rand(4, 6, dtype=torch.complex64),),
}


def call(held):
    return ((), held) if isinstance(held, dict) else (held, {})


@pytest.mark.parametrize("name", BESIDE_IDS)
def test_ids_of_a_text_are_counted_whatever_accompanies_them(name):
    batches = Batches()
    assert batches.see(call(BESIDE_IDS[name])) == 24
    assert batches.facts() == {"counted": "tokens"}


@pytest.mark.parametrize("name", NO_IDS)
def test_whole_numbers_of_something_else_are_no_ids(name):
    batches = Batches()
    assert batches.see(call(NO_IDS[name])) == 4
    assert batches.facts() == {"counted": "samples"}


def test_what_tells_of_a_models_output_counts_nothing():
    batches = Batches()
    made = torch.rand(4, 6)
    batches.made(made)
    assert batches.see(((made, ids(4)), {})) == 0  # a generator's pictures, and their classes
    assert batches.see(((made,), {"labels": ids(4, 6)})) == 0
    assert batches.see(((ids(4, 6), made), {})) == 24  # a state that goes on
    assert batches.see(((ids(4), made), {})) == 4


T = torch.arange(6)
BESIDE_MADE = {
    "a float mask": ((torch.zeros(4, 1, 6, 6),), {}),
    "a causal mask": ((torch.zeros(6, 6),), {}),
    "a named mask": ((), {"attention_mask": torch.zeros(4, 1, 6, 6)}),
    "a mask of whole numbers": ((), {"attention_mask": torch.ones(4, 6, dtype=torch.long)}),
    "a bool mask": ((torch.ones(4, 6) > 0,), {}),
    "positions of one row": ((T[None],), {}),
    "named positions": ((), {"position_ids": T.expand(4, 6), "cache_position": T}),
    "rotary angles": ((), {"position_embeddings": (torch.rand(1, 6, 8), torch.rand(1, 6, 8))}),
    "a tuple of them": (((torch.rand(6, 8), torch.rand(6, 8)),), {}),
    "complex ones": ((torch.rand(6, 4, dtype=torch.complex64),), {}),
    "all of it": ((torch.zeros(4, 1, 6, 6), T[None]), {"cache_position": T, "cos": torch.rand(1, 6, 8)}),
}


@pytest.mark.parametrize("part", BESIDE_MADE)
@pytest.mark.parametrize("fed", ["ids", "numbers"])
def test_parts_of_a_model_are_counted_where_the_batch_comes_in(part, fed):
    batches, h = Batches(), torch.rand(4, 6, 8, requires_grad=True) * 2
    args, kwargs = BESIDE_MADE[part]
    first = ids(4, 6) if fed == "ids" else torch.rand(4, 6, 3)
    for _ in range(2):  # steps
        counted = [batches.see(((first,), {}), model=1)]
        for layer in range(2, 5):
            counted.append(batches.see(((h + 1, *args), kwargs), model=layer))
        assert counted == [24 if fed == "ids" else 4, 0, 0, 0]
        batches.begin_anew()
    assert batches.facts() == {"counted": "tokens" if fed == "ids" else "samples"}


def test_data_beside_what_a_model_made_count_where_nobody_else_has_counted():
    batches, h, x = Batches(), torch.rand(4, 6, 8, requires_grad=True) * 2, torch.rand(4, 6, 8)
    assert [batches.see(((h, x + n), {}), model=1) for n in range(2)] == [4, 4]  # a cell: its state, and a batch
    assert batches.see(((x + 2, h), {}), model=2) == 4  # a state behind a batch
    queries = nn.Parameter(torch.rand(1, 6, 8)).expand(4, 6, 8)
    assert batches.see(((queries, x + 3), {}), model=3) == 4
    assert batches.see(((h, ids(4, 9)), {}), model=4) == 36  # a decoder's ids, behind what the encoder made
    assert batches.see(((h, x + 4), {}), model=5) == 0
    batches.begin_anew()
    assert batches.see(((h, x + 4), {}), model=5) == 4


def test_a_state_that_a_model_begins_with_is_known_by_one_that_it_has_made():
    batches, made = Batches(), torch.rand(4, 9)

    def counted(state, model=1):
        return batches.see(((ids(4, 6), state), {}), model=model)

    assert counted(torch.zeros(4, 9)) == 4  # numbers beside categories, for all that is known
    batches.made(made)
    assert counted(made.detach()) == 24
    assert counted(torch.zeros(4, 9)) == 24  # the next text begins
    assert batches.before_the_last().see(((ids(4, 6), torch.zeros(4, 9)), {}), model=1) == 24
    assert batches.see(((ids(3, 6), torch.zeros(3, 9)), {}), model=1) == 18
    assert [counted(torch.zeros(4, 5)), counted(torch.zeros(4, 9), model=2)] == [4, 4]
    assert batches.see(((torch.zeros(4, 9), ids(4, 6)), {}), model=1) == 4


def test_what_a_model_made_first_and_then_as_data_is_counted():
    batches, made = Batches(), torch.rand(4, 9)
    batches.made(made)
    assert batches.see(((made, torch.rand(4, 2)), {})) == 4  # a picture that was made, and what it is of
    assert batches.see(((torch.rand(5, 9), torch.rand(5, 2)), {})) == 5
    assert batches.see(((torch.rand(6, 2), made), {})) == 6
    assert batches.see(((torch.rand(7, 9),), {})) == 7


def test_a_call_that_an_error_has_left_has_counted_nothing():
    batches, h, x = Batches(), torch.rand(4, 8, requires_grad=True) * 2, torch.rand(4, 8)
    assert batches.see(((x,), {}), model=1) == 4
    batches.take_back()
    assert batches.see(((h, x + 1), {}), model=2) == 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_ids_in_ragged_rows_are_ids(layout):
    ragged = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=layout)
    assert Batches().see(((ragged, torch.rand(2, 7)), {})) == 8


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_one_text_behind_ragged_rows_that_a_model_made_is_one(layout):
    rows = [torch.rand(n, 8) for n in (3, 5)]
    ragged = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True) * 2
    assert Batches().see(((ragged, torch.arange(6)[None]), {})) == 6


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


def test_what_another_model_was_given_counts_there_until_it_is_written_or_thrown_away():
    batches, x, y = Batches(), torch.randn(4, 16), torch.randn(4, 16)
    assert [batches.see(((x, y), {}), model=each) for each in (1, 2, 2, 1, 1)] == [4, 0, 0, 4, 4]
    assert batches.see(((y,), {}), model=2) == 0
    assert batches.see(((torch.randn(4, 8), x), {}), model=2) == 4
    x.add_(1.0)
    assert [batches.see(((x,), {}), model=each) for each in (2, 1)] == [4, 0]
    batches.begin_anew()
    assert batches.see(((x,), {}), model=1) == 4
    with torch.inference_mode():
        unversioned = torch.randn(4, 16)
    assert [batches.see(((unversioned,), {}), model=each) for each in (1, 2)] == [4, 0]
    for _ in range(20):
        assert batches.see(((torch.randn(4, 16),), {}), model=2) == 4  # in memory of others before


def test_containers_are_searched_in_the_order_of_torch():
    a, b, c = torch.arange(3), torch.arange(4), torch.arange(5)
    batches = Batches()
    batches.see((({"z": a, "b": [OrderedDict(y=b), Pair(c, a)]}, 7, "text"), {"last": b}))
    assert int(batches.digest) == int(chain([a, b, c, a, b]))


def test_what_a_dict_of_the_programs_own_makes_of_an_item_is_not_asked_for():
    class Lazy(dict):
        def __getitem__(self, key):
            raise AssertionError("asked")

        def __iter__(self):
            raise AssertionError("asked")

    assert Batches().see(Lazy(x=torch.ones(4, 3))) == 4
