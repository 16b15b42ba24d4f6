"""Tensors inside containers: found in a fixed order, replaced by other tensors, put together again.

    freeze(obj, leaf) -> node         a copy of obj's containers, with leaf(tensor) in the place of each tensor
    thaw(node, values) -> obj         fresh containers, with values[i] in the place of Slot(i)

Known containers: tuple (named ones too), list, dict and its subclasses (a ModelOutput is one), slice, dataclasses and
any object that keeps its attributes in `__dict__`. Modules, arrays, functions and everything else are constants.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# Deeper than any output that models return; ends the walk through objects that hold each other. A plain object (a
# configuration, say) counts as several levels, because walking through many of them costs time and finds nothing.
MAX_DEPTH = 8
OBJECT_DEPTH = 4
_ATOMS = (
    *(
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type,
        ModuleType,
        FunctionType,
        BuiltinFunctionType,
        MethodType,
    ),
    *(nn.Module, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, torch.Size),
)
_Parts = tuple[list[Any], Callable[[Sequence[Any]], Any]]


@dataclass(frozen=True)
class Const:
    """Something that is the same in every replay."""

    value: Any


@dataclass(frozen=True)
class External:
    """A tensor that existed beside the tape, and the version that it had when it was used (-1: it keeps none)."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class Slot:
    """The place of a value that every replay computes anew."""

    index: int


@dataclass(frozen=True)
class Box:
    """A container and its content."""

    children: tuple[Node, ...]
    build: Callable[[Sequence[Any]], Any]


Node = Const | External | Slot | Box


def parts(obj: Any) -> _Parts | None:
    """The members of a container and the function that makes such a container of new ones; None for no container."""
    if isinstance(obj, (Tensor, *_ATOMS)):
        return None
    if isinstance(obj, tuple):
        kind = type(obj)
        if hasattr(obj, "_fields"):
            return list(obj), lambda new: kind(*new)
        return list(obj), (tuple if kind is tuple else kind)
    if isinstance(obj, list):
        return list(obj), list
    if isinstance(obj, slice):
        return [obj.start, obj.stop, obj.step], lambda new: slice(*new)
    if isinstance(obj, dict):
        return _mapping(obj)
    if hasattr(type(obj), "__array_interface__") or not hasattr(obj, "__dict__"):
        return None
    return _object(obj)


def _mapping(obj: dict[Any, Any]) -> _Parts:
    # Copied now: a model may pop from the dict that it is given. A plain one is not kept, nor are its old values.
    keys, plain = list(obj), type(obj) is dict
    kept = {} if plain else copy.copy(obj)

    def build(new: Sequence[Any]) -> dict[Any, Any]:
        fresh = {} if plain else copy.copy(kept)
        for key, value in zip(keys, new, strict=True):
            fresh[key] = value
        return fresh

    return [obj[key] for key in keys], build


def _object(obj: Any) -> _Parts:
    names = list(vars(obj))

    def build(new: Sequence[Any]) -> Any:
        if all(vars(obj).get(name) is value for name, value in zip(names, new, strict=True)):
            return obj  # nothing to replace: keep its identity
        fresh = copy.copy(obj)
        for name, value in zip(names, new, strict=True):
            object.__setattr__(fresh, name, value)
        return fresh

    return [vars(obj)[name] for name in names], build


def tensors(obj: Any, depth: int = 0) -> list[Tensor]:
    """All tensors inside `obj`, in the order in which `freeze` meets them."""
    if isinstance(obj, Tensor):
        return [obj]
    if depth > MAX_DEPTH:
        return []
    found = parts(obj)
    return [] if found is None else [t for child in found[0] for t in tensors(child, depth + _levels(obj))]


def _levels(obj: Any) -> int:
    return 1 if isinstance(obj, tuple | list | dict | slice) or is_dataclass(obj) else OBJECT_DEPTH


def freeze(obj: Any, leaf: Callable[[Tensor | float], Node], depth: int = 0) -> Node:
    """A copy of `obj`'s containers that holds `leaf(x)` for each tensor and each float x."""
    if isinstance(obj, Tensor) or type(obj) is float:
        return leaf(obj)
    found = parts(obj) if depth <= MAX_DEPTH else None
    if found is None:
        return Const(obj)
    children = tuple(freeze(child, leaf, depth + _levels(obj)) for child in found[0])
    mutable = isinstance(obj, list | dict) or any(isinstance(child, Box) for child in children)
    if not mutable and all(isinstance(child, Const) for child in children):
        return Const(obj)
    return Box(children, found[1])


def thaw(node: Node, values: Sequence[Any]) -> Any:
    """The object that `freeze` saw, made anew with `values` in its slots."""
    if isinstance(node, Const):
        return node.value
    if isinstance(node, External):
        return node.tensor
    if isinstance(node, Slot):
        return values[node.index]
    return node.build([thaw(child, values) for child in node.children])


def walk(node: Node) -> list[Node]:
    """All leaves of a frozen tree."""
    if isinstance(node, Box):
        return [leaf for child in node.children for leaf in walk(child)]
    return [node]
