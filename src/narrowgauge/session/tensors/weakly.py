"""Tensors of the program's, held weakly, and so that it may swap them all the same.

    torch.utils.swap_tensors(p, q)    two objects get each other's class, attributes and memory, and stay who they are;
                                      refused if anybody holds one of them weakly
    called by                         load_state_dict and Module.to where torch.__future__ says so, and by itself where
                                      parameters are of a tensor subclass: `.double()` of what FSDP2 has sharded

So references of ours are let go of while tensors are swapped, and taken again: `doors/swapping.py`. Who must hold some
with less than that, for a while, is asked before to hold them by `weakly`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import ReferenceType, WeakSet, WeakValueDictionary, ref

from torch import Tensor


class Briefly(Protocol):
    """Holds tensors by references of its own."""

    def hold_by_weakly(self) -> None:
        """Hold them by `weakly`, all of them."""


class Weak:
    """A tensor for as long as somebody else holds it; `weakly(x)` makes one."""

    __slots__ = ("__weakref__", "_known")

    def __init__(self) -> None:
        self._known: ReferenceType[Tensor] | None = None

    def __call__(self) -> Tensor | None:
        """The tensor; None once it is gone, and while it is swapped."""
        return None if self._known is None else self._known()

    def let_go(self) -> None:
        """Hold nothing."""
        self._known = None

    def take(self, x: Tensor) -> None:
        """Hold x."""
        self._known = ref(x)


_HELD: WeakValueDictionary[int, Weak] = WeakValueDictionary()  # by the ids of tensors, one for all who hold them
_SWAPPED: dict[int, Weak] = {}  # of those that are swapped just now
_BRIEFLY: WeakSet[Briefly] = WeakSet()


def weakly(x: Tensor) -> Weak:
    """x, held weakly."""
    known = _SWAPPED.get(id(x))
    if known is not None:  # another thread swaps it, and takes it afterwards
        return known
    known = _HELD.get(id(x))
    if known is None or known() is not x:  # another tensor had its id
        known = _HELD[id(x)] = Weak()
        known.take(x)
    return known


def holds_briefly(holder: Briefly) -> None:
    """This one does so, as long as it is there."""
    _BRIEFLY.add(holder)


@contextmanager
def let_go(*tensors: Tensor) -> Iterator[None]:
    """Meanwhile nobody here holds these."""
    for holder in list(_BRIEFLY):
        holder.hold_by_weakly()
    swapped: list[tuple[Tensor, Weak]] = []
    for x in tensors:
        if id(x) not in _SWAPPED:
            one = _HELD.get(id(x))
            one = _SWAPPED[id(x)] = Weak() if one is None or one() is not x else one
            one.let_go()
            swapped.append((x, one))
    try:
        yield
    finally:
        for x, one in swapped:
            if _SWAPPED.pop(id(x), None) is one:  # else all were let go of meanwhile
                _HELD[id(x)] = one
                one.take(x)


def let_go_of_all() -> None:
    """Hold none of them any more."""
    _SWAPPED.clear()
    for one in list(_HELD.values()):
        one.let_go()
