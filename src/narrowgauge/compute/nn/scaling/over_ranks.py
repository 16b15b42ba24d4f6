"""Amaxes that ranks have in common: the largest of all, once per step, so that all make the same scale of it.

    amax_now_s  <-  max over the ranks that have s        one collective for all sites of the same ranks

A scale that outlives its step is made from what several ranks saw: their share of the batch, their part of a weight.
Who they are says

    a group that was given               for the whole table
    DistributedDataParallel, running     its process group, for all converted layers inside of it
    the mesh of the layer's weight       FSDP2, tensor parallelism: one collective per dimension of it

Only ranks that step together may ask each other, or one would wait for the rest. Those of a mesh do, or their next
gather would not find each other; those of DDP do in a step whose forward ran inside of it, unless it is told by `join`
that some may have run out of data. Rows have the same order on all of them.

A rank that saw nothing (-1) takes what the others saw. The device waits for a collective, the host does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.compute.nn.scaling.resume_warnings import warn_joined


@dataclass
class _Wrapped:
    """The converted layers inside of one DistributedDataParallel."""

    wrapper: ReferenceType[nn.Module]
    rows: list[int]
    ran: bool = False  # since the last step ended
    replayed: bool = False  # it was captured, and runs without being heard


class OverRanks:
    """Which rows of a table which ranks have in common.

    Args:
        wanted: whether to ask other ranks at all; or the process group that has all rows in common.
    """

    def __init__(self, wanted: Any = True) -> None:
        self.wanted = wanted
        self._meshes: dict[Any, list[int]] = {}
        self._wrapped: dict[int, _Wrapped] = {}  # by the wrapper's id
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def add(self, first: int, count: int, mesh: Any) -> None:
        """Rows from `first` on are those of a weight on `mesh`, and of no other."""
        rows = range(first, first + count)
        for known in self._meshes.values():
            known[:] = [row for row in known if row not in rows]
        self._meshes[mesh] = sorted([*self._meshes.get(mesh, []), *rows])

    def runs(self, wrapper: nn.Module, table: Any, count: int, *, captured: bool) -> None:
        """A layer of `table` runs inside of this DDP; a layer has `count` rows."""
        known = self._wrapped.get(id(wrapper))
        if known is None or known.wrapper() is not wrapper:
            states = [vars(module).get("_fp8") for module in wrapper.modules()]
            firsts = {state.row for state in states if state is not None and state.table is table}
            rows = sorted(first + i for first in firsts for i in range(count))
            known = self._wrapped[id(wrapper)] = _Wrapped(ref(wrapper), rows)
        known.ran = True
        known.replayed |= captured

    @property
    def in_step(self) -> bool:
        """Whether the end of this step asks ranks that need not all be where this one is: not all of DDP's save."""
        if isinstance(self.wanted, bool):
            return self.wanted and any(each.ran for each in self._wrapped.values())
        return True

    def reduce(self, amax_now: Tensor) -> None:
        """Make amax_now [S] the maximum over the ranks, in place."""
        wrapped, self._wrapped = self._running(), {at: w for at, w in self._wrapped.items() if w.wrapper() is not None}
        if self.wanted is False or not dist.is_available() or not dist.is_initialized():
            return
        if self.wanted is not True:
            dist.all_reduce(amax_now, dist.ReduceOp.MAX, group=self.wanted)
            return
        for mesh, rows in self._meshes.items():
            self._reduce(amax_now, rows, [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1])
        for wrapper, rows in wrapped:
            self._reduce(amax_now, rows, [wrapper.process_group] if wrapper.process_group.size() > 1 else [])

    def _reduce(self, amax_now: Tensor, rows: list[int], groups: list[Any]) -> None:
        if not groups or not rows:
            return
        key = tuple(rows)
        index = self._indices.get(key)
        if index is None or index.device != amax_now.device:
            index = self._indices[key] = torch.tensor(rows, device=amax_now.device)
        own = amax_now[index]
        for group in groups:
            dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
        amax_now[index] = own

    def _running(self) -> list[tuple[Any, list[int]]]:
        """The wrappers that this step's forward ran in, all of whose ranks step."""
        found: list[tuple[Any, list[int]]] = []
        for each in self._wrapped.values():
            wrapper: Any = each.wrapper()
            ran, each.ran = each.ran or each.replayed, False
            if wrapper is None or not ran or self.wanted is not True:
                continue
            if wrapper._join_config.enable:
                warn_joined()
            else:
                found.append((wrapper, each.rows))
        return found
