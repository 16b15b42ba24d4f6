"""A weight that is multiplied piece by piece: an input that comes with each piece is one input.

    for a, b in tiles: F.linear(h, w[a:b])      a loss that never holds all of its logits
    F.linear(h, w)                              the same product in one: h comes once

An input is known by its memory, what it has of it and how often that was written, as batches are (`tensors/given`).
With a piece that it came with before it comes again. Experts in one parameter are no such pieces: each has its tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Pieces(threading.local):
    """Of the open step, of each thread its own."""

    def __init__(self) -> None:
        # By parameter and input: the pieces that it came with. While the reference is held the memory's address is
        # not used again.
        self._by: dict[Hashable, tuple[set[Hashable], StorageWeakRef]] = {}
        self._step = 0

    def again(self, x: Any, piece: Tensor, parameter: Tensor, step: int) -> bool:
        """Whether x came before, with other pieces of this parameter, in this step (any number for it)."""
        if piece.numel() == parameter.numel() or parameter.dim() != 2 or type(x) is not Tensor or x.is_inference():
            return False
        if x.is_nested or x.layout is not torch.strided:  # of no one shape, or of several memories
            return False
        if step != self._step:
            self._by.clear()
            self._step = step
        memory = x.untyped_storage()
        key = id(parameter), memory._cdata, x.storage_offset(), x.shape, x.stride(), x._version
        which = piece.data_ptr(), piece.shape
        known = self._by.get(key)
        if known is None or which in known[0]:
            self._by[key] = {which}, StorageWeakRef(memory)
            return False
        known[0].add(which)
        return True
