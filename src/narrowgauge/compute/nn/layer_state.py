"""What a converted layer knows beside its parameters, and how that is copied with the model."""

from __future__ import annotations

import zlib
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from narrowgauge.compute.kernels import Backend
from narrowgauge.compute.nn.kept_weight import KeptWeight
from narrowgauge.compute.nn.observer import Observer, ResultRole, Samples
from narrowgauge.compute.nn.parallel.placements import holders, is_distributed, is_partitioned
from narrowgauge.compute.nn.scaling.clock import StepClock
from narrowgauge.compute.nn.scaling.scale_table import ScaleTable
from narrowgauge.compute.nn.tracing.handle import new_handle
from narrowgauge.compute.nn.tracing.in_graph import REMADE, Traced
from narrowgauge.compute.recipes import Recipe

LAYERS_IN_TURN = 32  # of so many layers one shows a result in a step, where kernels watch the operands
RESULT_ROLES: tuple[ResultRole, ...] = get_args(ResultRole)


@dataclass(eq=False)
class LayerState:
    """What an Fp8Linear knows beside its parameters.

    `row` is the first of its three rows in `table`, None without one. `calls` counts forwards, recomputed
    ones included; `rows_seen` is M of the last forward with grad. How much of a result the gemm check
    recomputes: `sample_rows` of output and grad_input, `sample_outputs` rows by `sample_columns` of grad_weight;
    `check` is the last watched step and whose turn it was. Of a weight that is spread over ranks, `mesh` is the
    DeviceMesh on which it lies between its uses, and `copies` says of an operand by its role which is the lowest rank
    with the same values, if others have them.
    """

    name: str
    recipe: Recipe
    backend: Backend
    clock: StepClock
    table: ScaleTable | None = None
    row: int | None = None
    observer: Observer | None = None
    calls: int = 0
    rows_seen: int = 0
    sample_rows: int = 4
    sample_outputs: int = 128  # a gradient is mostly noise: of few of its elements the gain would scatter by percents
    sample_columns: int = 16
    check: tuple[int, int, int] = (-1, -1, 1)  # a step, where its turn stands, how far that went
    kept_weight: KeptWeight = field(default_factory=KeptWeight)
    samples: dict[tuple[int, int], Samples] = field(default_factory=dict)  # of compiled forwards, by step and codes
    recorded: tuple[int, int] = (-1, 0)  # a step, and how many of its compiled forwards wait for their backward
    mesh: Any = None
    copies: dict[str, int | None] = field(default_factory=dict)
    handle: Tensor = field(init=False)
    traced: Traced = field(init=False)
    keeps_high: bool = field(init=False)  # whether a product or an operand does: then it runs by `switched`

    def __post_init__(self) -> None:
        self.save(REMADE)
        self.keeps_high = self.recipe.keeps_high
        self.handle = new_handle(self)

    def use(self, recipe: Recipe) -> None:
        """Go on by a recipe that differs in what it keeps high: scales and histories are of the same rules."""
        self.recipe, self.keeps_high = recipe, recipe.keeps_high
        self.save(self.traced.saves)
        self.kept_weight.forget()

    def save(self, what: int) -> None:
        """Choose what a compiled forward saves of its input: CODES or REMADE."""
        self.traced = Traced.of(self.recipe, what)

    def move(self, device: torch.device) -> None:
        """Follow the layer's weight: a handle elsewhere would keep CUDA graphs away."""
        if self.handle.device != device:
            self.handle = new_handle(self, device)

    def lies(self, weight: Tensor | None) -> None:
        """Follow the layer's weight onto a mesh and off it; the largest is where it lies between its uses."""
        if is_distributed(weight) and (self.mesh is None or weight.device_mesh.size() > self.mesh.size()):  # type: ignore[union-attr]
            self.mesh = weight.device_mesh  # type: ignore[union-attr]
            if self.table is not None and self.row is not None:
                self.table.share(self.row, self.mesh)
        elif weight is not None and self.gathers(weight):
            self.kept_weight.lasting = False

    def gathers(self, weight: Tensor) -> bool:
        """Whether this weight, which is about to be multiplied, is there for this use only."""
        if self.mesh is None:
            return is_partitioned(weight)
        kept = weight.device_mesh.size() if is_distributed(weight) else 0  # type: ignore[attr-defined]
        return bool(kept < self.mesh.size())

    def note_copies(self, weight: Tensor, everywhere: dict[str, list[bool]] | None = None) -> None:
        """Find out who has the same operands: along which dimensions of the mesh, as the weight is in use, all do."""
        if self.copies or self.mesh is None:
            return
        known = everywhere or {"weight": []}
        rest = len(known["weight"])
        for role, free in known.items():
            mesh = weight.device_mesh if is_distributed(weight) else self.mesh  # type: ignore[attr-defined]
            if role == "weight" and rest < self.mesh.ndim:  # along the leading ones it was gathered
                mesh, free = self.mesh, [True] * (self.mesh.ndim - rest) + free
            self.copies[role] = holders(mesh, free)[0] if any(free) else None

    @property
    def waits(self) -> bool:
        """Whether a compiled forward of this step was recorded, and its backward has not come yet."""
        return self.recorded[0] == self.clock.step and self.recorded[1] > 0

    def wait(self, more: int) -> None:
        """Count a recorded forward (1), or a backward (-1)."""
        step, count = self.recorded
        self.recorded = self.clock.step, max(0, (count if step == self.clock.step else 0) + more)

    def result_to_check(self, step: int) -> ResultRole | None:
        """The result whose gemm is checked in a watched step: the three in turn, each layer beginning elsewhere.

        None where it is other layers' turn: on a GPU one of 32 is checked in a step, or one of 8 where steps that are
        not watched lie between.
        """
        before, turn, _ = self.check
        if step != before:
            turn = turn if turn >= 0 else zlib.crc32(self.name.encode())
            pace = 1 if step == before + 1 or not self.backend.watches else 4
            self.check = step, turn + pace, pace
        round_, later = divmod(self.check[1], LAYERS_IN_TURN if self.backend.watches else 1)
        return RESULT_ROLES[round_ % len(RESULT_ROLES)] if later < self.check[2] else None

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        """A copy that shares nothing that changes; layers of one model share one copied table and clock."""
        twin = object.__new__(LayerState)
        memo[id(self)] = twin
        twin.__setstate__(self.__getstate__())
        twin.table, twin.clock = deepcopy(self.table, memo), deepcopy(self.clock, memo)
        twin.subscribe()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the observer, which belongs to a run, and the kept codes, which belong to this weight."""
        state = {**vars(self), "observer": None, "kept_weight": KeptWeight(), "samples": {}, "recorded": (-1, 0)}
        state |= {"mesh": None, "copies": {}}  # found again with the weight
        del state["handle"]  # an address is nobody else's
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.handle = new_handle(self)
        self.subscribe()

    def subscribe(self) -> None:
        """Let the clock roll the table: once per step, however many layers ask."""
        if self.table is not None:
            self.clock.subscribe(self.table.roll)
