"""A weight that is multiplied piece by piece: an input that comes with each piece is one input.

    for a, b in tiles: F.linear(h, w[a:b])      a loss that never holds all of its logits
    F.linear(h, w)                              the same product in one: h comes once

An input is known by its memory, what it has of it and how often that was written, as batches are (`tensors/given`).
With a piece that it came with before it comes again. Experts in one parameter are no such pieces: each has its tokens.

A piece is known by where it lies in its parameter. What was cast lies elsewhere, maybe where another was that is gone:
there the graph remembers what of the parameter it is.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.session.tensors.storage import address_of, storage_of

_STARTS = {  # nodes of a graph, and what of a tensor they take, besides which of their results it is
    "AsStridedBackward": ("size", "stride", "storage_offset"),
    "SelectBackward": ("dim", "index"),
    "SliceBackward": ("dim", "start", "end", "step"),
    "SplitBackward": ("dim", "split_size"),
    "SplitWithSizesBackward": ("dim", "split_sizes"),
    "UnbindBackward": ("dim",),
}
_CHOICES = "IndexBackward", "IndexSelectBackward"  # by numbers of a tensor's, which nobody reads: each is another


class Pieces(threading.local):
    """Of the open step, of each thread its own."""

    def __init__(self) -> None:
        # By parameter and input: the pieces that it came with. While the reference is held the memory's address is
        # not used again.
        self._by: dict[Hashable, tuple[set[Hashable], StorageWeakRef]] = {}
        self._step = 0

    def again(self, x: Any, piece: Tensor, parameter: Tensor, step: int) -> bool:
        """Whether x came before, with other pieces of this parameter, in this step (any number for it)."""
        if piece.numel() == parameter.numel() or type(x) is not Tensor or x.is_inference():
            return False
        if x.is_nested or x.layout is not torch.strided:  # of no one shape, or of several memories
            return False
        if step != self._step:
            self._by.clear()
            self._step = step
        memory = x.untyped_storage()
        key = id(parameter), memory._cdata, x.storage_offset(), x.shape, x.stride(), x._version
        which = _place(piece, parameter), piece.shape
        known = self._by.get(key)
        if known is None or which in known[0]:
            self._by[key] = {which}, StorageWeakRef(memory)
            return False
        known[0].add(which)
        return True


def _place(piece: Tensor, parameter: Tensor) -> Hashable:
    """What of its parameter a piece is; of a cast one as far back as its graph leads."""
    mine, whole = storage_of(piece), storage_of(parameter)
    if piece.grad_fn is None or (mine is not None and whole is not None and mine._cdata == whole._cdata):
        return address_of(piece), piece.stride()
    place: list[Hashable] = []
    node: Any = piece.grad_fn
    output = piece.output_nr
    while node is not None:
        name = node.name().rstrip("0123456789")
        if name in _STARTS:
            place.append((name, output, *(getattr(node, f"_saved_{what}", None) for what in _STARTS[name])))
        elif name in _CHOICES:
            place.append((name, node._sequence_nr()))
        node, output = next(((each, at) for each, at in node.next_functions if each is not None), (None, 0))
    return tuple(place)
