"""A recorded step of this rank as one vector on one device, which waits there until it is merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.observe.stats.guard import Marks
from narrowgauge.observe.stats.transfer import Packed
from narrowgauge.session.ranks.layout import Layout


@dataclass(frozen=True)
class Told:
    """What the session knows of this rank's tensors, asked at the end of each recorded step.

    Args:
        copies: of an operand site, the lowest rank that holds the same values; None where nobody is known to.
        meshes: of a weight's site, the lowest rank of the mesh that it lies on; None without one.
        stages: of a site, the stage of a pipeline that it is in; None if it is in none.
        models: how many models the program has had so far.
        mesh: the lowest rank of the mesh that what is trained lies on; None without one.
        began: a name for the weights that its models began with and which of them are trained; "" if it has none.
        dear: whether recorded steps have lost this rank as much time as compiling for them would take.
        short: whether this rank's steps are short, and such that rows of those between may be brief.
    """

    copies: Callable[[str], int | None] = lambda site: None
    meshes: Callable[[str], int | None] = lambda site: None
    stages: Callable[[str], int | None] = lambda site: None
    models: Callable[[], int] = lambda: 0
    mesh: Callable[[], int | None] = lambda: None
    began: Callable[[], str] = lambda: ""
    dear: Callable[[], bool] = lambda: False
    short: Callable[[], bool] = lambda: False


@dataclass
class OpenStep:
    """What a step left on each of this rank's devices, and its table: operands and results (layout.py)."""

    step: int
    packed: list[Packed]
    table: Tensor
    layout: Layout

    @classmethod
    def of(
        cls,
        step: int,
        packed: list[Packed],
        told: Told,
        scalars: tuple[str, ...],
        rows: int,
    ) -> OpenStep:
        """The step's tables in one, on the first of its GPUs if there is any.

        Args:
            told: of what lies where.
            scalars, rows: names and number of the rows that will go with it.
        """
        operands, results = ([getattr(each, kind) for each in packed] for kind in ("operands", "results"))
        tables: list[Tensor] = [table for _, table in (*operands, *results) if table is not None]
        home = next((t.device for t in tables if t.is_cuda), tables[0].device if tables else _own_device())
        sites, seen = (tuple(site for names, _ in kind for site in names) for kind in (operands, results))
        stages = tuple(told.stages(site) for site in (*sites, *seen))
        by = tuple(each.by for each in packed for _ in each.operands[0])
        layout = Layout(
            operands=sites,
            results=seen,
            scalars=scalars,
            rows=rows,
            copies=tuple(told.copies(site) for site in sites),
            meshes=tuple(told.meshes(site) for site in sites),
            stages=stages if any(stage is not None for stage in stages) else (),
            by=by if any(by) else (),
            models=told.models(),
            mesh=told.mesh(),
            began=told.began(),
        )
        parts = [table.reshape(-1).to(home) for table in tables]
        table = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=home)
        return cls(step, packed, table, layout)

    def with_scalars(self, rows: Tensor, size: int) -> Tensor:
        """The table with its rows of scalars (on the host), [size]; what is behind them is 0. Waits for nothing."""
        out = torch.zeros(size, dtype=torch.float64, device=self.table.device)
        begin = self.table.numel()
        out[:begin] = self.table
        flat = rows.reshape(-1)
        out[begin : begin + flat.numel()].copy_(flat.pin_memory() if out.is_cuda else flat, non_blocking=True)
        return out

    @property
    def size(self) -> int:
        """How many numbers are in the table with its rows of scalars."""
        return self.layout.cuts[2]

    @property
    def marks(self) -> Marks:
        """Around what the devices worked for the watch."""
        return [mark for each in self.packed for mark in each.marks]


def _own_device() -> torch.device:
    """Where a rank without a single site would have its tables."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
