"""One thing that a program compiled: what it is given, what it is a method of, and what is known of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn

from narrowgauge.session.models.naming import is_module, modules_in, of_class
from narrowgauge.session.models.root import Root

MOST_OBJECTS = 256  # of which a compiled function is called, say; those of a program that makes them anew are forgotten
MOST_WRAPPED = 16
_NO_DATA = int, float, str, type(None)  # what no model is called with alone


class Compiled:
    """What is known of one thing that the program compiled."""

    def __init__(self, owner: Any) -> None:
        self._owner = weak(owner)
        # By the id of the model that it is given, of a method's object, or of None; with that object.
        self._roots: dict[int, tuple[Root, ref[Any] | None]] = {}
        self.helps: tuple[ref[Any] | None, int] = None, -1  # a call that names no model, and how many models there were
        self.looked_at: set[int] = set()  # models that it was given

    def of(self, owner: Any) -> bool:
        """Whether it is this one's, and not that of another at its address."""
        return self._owner is None or self._owner() is owner

    def root(self, by: Any) -> Root | None:
        """The model that a call by this is of; None where nobody knows, or it is gone."""
        root, whose = self._roots.get(id(by), (None, None))
        return root if root is not None and root.alive and (whose is None or whose() is by) else None

    def knows(self, by: Any, root: Root) -> None:
        """A call by this is of that model."""
        whose = weak(by)
        if whose is None and by is not None:  # another may have its address later
            return
        if len(self._roots) >= MOST_OBJECTS:
            self._roots.clear()
        self._roots[id(by)] = root, whose


def object_of(owner: Any, args: tuple[Any, ...]) -> Any:
    """What a method is called of that was compiled in its class, as a function."""
    if type(owner) is not FunctionType or not args or is_module(args[0]):
        return None
    function = next(of_class(type(args[0]), owner.__name__), None)
    for _ in range(MOST_WRAPPED):
        if function is owner:
            return args[0]
        if type(function) is not FunctionType:
            break
        function = vars(function).get("__wrapped__")
    return None


def bound(owner: Any, whose: Any) -> Any:
    """The method of that object, or the function if there is none."""
    return owner if whose is None else MethodType(owner, whose)


def weak(one: Any) -> ref[Any] | None:
    """None of None, and of what has no weak reference: an object with slots."""
    try:
        return None if one is None else ref(one)
    except TypeError:
        return None


def given_to(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[nn.Module]:
    """The modules that a compiled function is given to call, with something to call them with."""
    while isinstance(owner, partial):
        owner, args, kwargs = owner.func, (*owner.args, *args), owner.keywords | kwargs
    calls = not torch.is_grad_enabled()  # else what an object holds may be no more than asked for its weights
    given = [(x, modules_in(x) if calls or isinstance(x, nn.Module) else ()) for x in (*args, *kwargs.values())]
    modules = [module for _, found in given for module in found]
    data = any(not found and not isinstance(x, _NO_DATA) for x, found in given)
    return modules if data else ()
