from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.session.same_weights.tree import Const, External, Node, Slot, freeze, tensors, thaw, walk

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Record:
    name: str
    value: Any


class Plain:
    def __init__(self, value: Any) -> None:
        self.value, self.other = value, 3


class Items(OrderedDict):
    pass


A, B = torch.zeros(2), torch.ones(3)
OBJECTS = [
    A,
    (A, [B, None], {"x": A, "y": {"z": B}}),
    Pair(A, B),
    Record("r", [A]),
    Plain((A, B)),
    Items(x=A, y=B),
    UserDict(x=A),
    [slice(A, None, B), ...],
    torch.max(torch.ones(2, 2), dim=0),
]


@pytest.mark.parametrize("obj", OBJECTS, ids=lambda o: type(o).__name__)
def test_every_tensor_is_found_and_replaced_in_order(obj: Any) -> None:
    found = tensors(obj)
    assert len(found) >= 1
    order: list[int] = []

    def leaf(x: Tensor | float) -> Node:
        order.append(next(i for i, t in enumerate(found) if t is x and i not in order))
        return Slot(order[-1])

    node = freeze(obj, leaf)
    new = [torch.full((1,), float(i)) for i in range(len(found))]
    again = thaw(node, new)
    assert type(again) is type(obj)
    assert all(a is b for a, b in zip(tensors(again), new, strict=True))
    assert all(a is b for a, b in zip(tensors(obj), found, strict=True))


def test_containers_are_made_anew_each_time() -> None:
    batch = {"x": A, "labels": B, "more": []}
    node = freeze((batch,), lambda t: External(t, 0))
    del batch["labels"]
    (first,) = thaw(node, [])
    first.pop("x")
    first["more"].append(1)
    (second,) = thaw(node, [])
    assert list(second) == ["x", "labels", "more"]
    assert second["more"] == []


def test_an_object_without_anything_to_replace_keeps_its_identity() -> None:
    obj = Plain(A)
    assert thaw(freeze(obj, lambda t: External(t, 0)), []) is obj


@pytest.mark.parametrize(
    "obj", [None, 3, "text", nn.Linear(1, 1), torch.float32, len, Plain(3), (1, "a"), torch.Size([2])]
)
def test_everything_else_is_a_constant(obj: Any) -> None:
    assert freeze(obj, lambda t: Slot(0)) == Const(obj)


def test_objects_that_hold_each_other_end() -> None:
    a, b = Plain(None), Plain(A)
    a.value, b.other = b, a
    assert len(tensors(a)) >= 1
    assert all(isinstance(x, Const | External) for x in walk(freeze(a, lambda t: External(t, 0))))
