"""Amaxes that ranks have in common: the largest of all, once per step, so that all make the same scale of it.

    amax_now_s  <-  max over the ranks of s's mesh          one collective per dimension of a mesh, for all of its sites

A scale that outlives its step is made from what several ranks saw: their share of the batch, their part of a weight.
The mesh is that of the layer's weight (FSDP2, tensor parallelism). Its ranks step together, or their next gather would
not find each other; and they have its layers in the same order.

A rank that saw nothing (-1) takes what the others saw.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class OverRanks:
    """Which rows of a table belong to which mesh."""

    def __init__(self) -> None:
        self._rows: dict[Any, list[int]] = {}
        self._indices: dict[Any, Tensor] = {}

    def add(self, first: int, count: int, mesh: Any) -> None:
        """Rows from `first` on are those of a weight on `mesh`, and of no other."""
        rows = range(first, first + count)
        for known in self._rows.values():
            known[:] = [row for row in known if row not in rows]
        self._rows[mesh] = sorted([*self._rows.get(mesh, []), *rows])
        self._indices.clear()

    def reduce(self, amax_now: Tensor) -> None:
        """Make amax_now [S] the maximum over the ranks, in place."""
        for mesh, rows in self._rows.items():
            groups = [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
            if not groups or not rows:
                continue
            index = self._indices.get(mesh)
            if index is None or index.device != amax_now.device:
                index = self._indices[mesh] = torch.tensor(rows, device=amax_now.device)
            own = amax_now[index]
            for group in groups:
                dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
            amax_now[index] = own
