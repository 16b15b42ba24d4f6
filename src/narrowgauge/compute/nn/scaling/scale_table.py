"""Delayed and static scales of a whole model: one table, one row per site, one roll per optimizer step.

    amax_now_s  = max of this step's amaxes of site s, over all microbatches      -1: no data yet
    roll:         history_s <- [amax_now_s, history_s[:-1]]                       only sites with data
                  assumed_s  = max(history_s[:H])  or  history_s[0]               "max", "most_recent"
                  inv_scale_s = rule(assumed_s), scale_s = 1 / inv_scale_s        kept when assumed_s is 0
                  amax_now_s <- -1

The scale of a step is fixed before the step begins, so every microbatch and every recomputed forward sees the
same one, and the amax of a step is read before the history rolls. A non-finite amax is never stored: in a
max-history it would freeze the scale for the whole window.

A scale of 0 means "not yet": the site takes its first tensor's own amax ("current"), and keeps it until the
first roll. A site that has seen only zeros is still waiting. The first is one that a backward pass will come to: in a
reentrant checkpoint, too, whose first forward runs without grad and leaves its scale, not its amax (`tracing.kept`).

Rows: a module's three sites are neighbours, input, weight, grad_output. Legend: S = sites, H = history.
Source: FP8 Formats for Deep Learning (arXiv:2209.05433), section 4; TransformerEngine DelayedScaling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.nn.scaling.over_ranks import OverRanks
from narrowgauge.compute.nn.scaling.resume_warnings import warn_lost
from narrowgauge.compute.nn.scaling.rolling import HAS_TRITON, NO_DATA, Group, roll_at_once, roll_by_groups, rules_of
from narrowgauge.compute.quant import inv_scale_from_amax
from narrowgauge.compute.quant.scaling import FLOAT32_MAX
from narrowgauge.compute.recipes import ROLES, Operand, Recipe
from narrowgauge.errors import ConversionError, ShapeError, nearest

NOT_YET = 0.0
_FOLD_AFTER = 4096  # amaxes of a long accumulation are folded early, so that they do not pile up


class ScaleTable:
    """history [S, H]; scale, inv_scale and amax_now [S] of every delayed or static site; all float32.

    They are changed in place, so that a captured CUDA graph finds them; what is saved for a backward pass are copies.
    `reduce_amax` says which ranks have amaxes in common: those that are known to (True), none, or a process group.
    """

    def __init__(self, device: torch.device | str = "cpu", reduce_amax: Any = True) -> None:
        self.history = torch.zeros(0, 1, dtype=torch.float32, device=device)  # whatever the program's default dtype is
        self.scale = torch.zeros(0, dtype=torch.float32, device=device)
        # Kept beside scale, whose reciprocal would round twice.
        self.inv_scale = torch.zeros(0, dtype=torch.float32, device=device)
        self.amax_now = torch.zeros(0, dtype=torch.float32, device=device)
        self.scratch = torch.zeros(0, 2, dtype=torch.int32, device=device)  # where kernels count their programs
        self.steps = 0
        self.sites: list[str] = []
        self.lost = ""  # a module whose weights came without their scaling state; told at the next record
        self._groups: list[Group] = []
        self._pending: list[tuple[int, Tensor]] = []
        self._waiting: set[int] = set()  # rows whose scale may still be NOT_YET
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self._given: dict[int, Given] = {}  # views of the rows
        self._rules: Any = None  # of every row, for the kernel that rolls them
        self._over_ranks = OverRanks(reduce_amax)

    def __getstate__(self) -> dict[str, Any]:
        """Without the views, which would be copied apart from what they show, and the ranks, which are not copied."""
        alone = self._over_ranks.wanted is False
        return {**vars(self), "_given": {}, "_rules": None, "_over_ranks": OverRanks(not alone)}

    def add(self, module: str, recipe: Recipe) -> int:
        """Add the three sites of `module` and return the row of the first."""
        first = len(self.sites)
        if f"{module}:{ROLES[0]}" in self.sites:
            raise ConversionError(f"{module!r} already has its rows in this table; release it before converting again.")
        device, given = self.scale.device, dict(recipe.scales)
        width = max(self.history.shape[1], recipe.history)
        history = torch.zeros(first + 3, width, dtype=torch.float32, device=device)
        history[:first, : self.history.shape[1]] = self.history
        start = NOT_YET if recipe.initial == "current" else 1.0
        sites = [f"{module}:{role}" for role in ROLES]
        scales = [given.get(site, start) for site in sites]
        self.history = history
        fresh = torch.tensor(scales, dtype=torch.float32, device=device)
        self.scale = torch.cat([self.scale, fresh])
        inv_scale = fresh.reciprocal().clamp(max=FLOAT32_MAX)  # that of the least scale rounds up to Inf
        self.inv_scale = torch.cat([self.inv_scale, torch.where(fresh > 0, inv_scale, NOT_YET)])
        self.amax_now = torch.cat([self.amax_now, torch.full((3,), NO_DATA, dtype=torch.float32, device=device)])
        self.scratch = torch.zeros(first + 3, 2, dtype=torch.int32, device=device)
        self.sites += sites
        self._waiting |= {first + i for i, scale in enumerate(scales) if scale == NOT_YET}
        for i, role in enumerate(ROLES):
            self._group(recipe, recipe.uses(role)[0]).rows.append(first + i)
        self._indices.clear()
        self._given.clear()
        self._rules = None
        return first

    def share(self, row: int, mesh: Any) -> None:
        """Let the layer whose first row this is have its amaxes in common with the ranks of a mesh, from now on."""
        self._over_ranks.add(row, len(ROLES), mesh)

    def runs_in(self, wrapper: nn.Module, *, captured: bool) -> None:
        """A layer of it runs inside of a DistributedDataParallel, whose ranks have this step's amaxes in common."""
        self._over_ranks.runs(wrapper, self, len(ROLES), captured=captured)

    @property
    def asks_others(self) -> bool:
        """Whether to end this step takes ranks that need not all save the model."""
        return self._over_ranks.in_step

    def check_scales(self, recipe: Recipe) -> None:
        """Raise ConversionError if `recipe` gives a scale to a site that no converted layer has."""
        for site, _ in recipe.scales:
            if site not in self.sites:
                raise ConversionError(
                    f"recipe {recipe.name!r} gives a scale to {site!r}, which is no converted site; "
                    f"{nearest(site, self.sites)}"
                )

    def knows(self, row: int) -> bool:
        """Whether `row` surely has a scale; without one, the first tensor's own amax makes one (`scale_of`)."""
        return row not in self._waiting

    def given(self, row: int, device: torch.device, *, write: bool) -> Given:
        """The scale of this step for `row`, on `device`; if `write`, with a slot that takes the amax."""
        if write:
            self._tell_what_is_lost()
        if row not in self._given:
            slot, scratch = self.amax_now[row : row + 1], self.scratch[row]
            self._given[row] = Given(self.scale[row], self.inv_scale[row], slot, scratch)
        given = self._given[row]
        if device != self.scale.device:
            return Given(given.scale.to(device), given.inv_scale.to(device))
        return given if write else Given(given.scale, given.inv_scale, None, given.scratch)

    def slot(self, row: int, device: torch.device) -> Tensor | None:
        """Where a kernel on `device` leaves the amax of `row`; None on another device than the table's."""
        self._tell_what_is_lost()
        return self.amax_now[row : row + 1] if device == self.scale.device else None

    def scale_of(self, row: int, operand: Operand, amax: Tensor, *, write: bool) -> tuple[Tensor, Tensor]:
        """Return the scale and inv_scale, both [], that this step uses for `row`, on amax's device.

        Before there is one, it is made from this tensor's own `amax`, and kept if `write`.
        """
        scale, inv_scale = self.scale[row], self.inv_scale[row]
        if self.knows(row):
            return scale.to(amax.device), inv_scale.to(amax.device)
        amax_here = amax.to(scale.device)
        own = inv_scale_from_amax(amax_here, operand.fmt, operand.scaling, operand.margin)
        waiting = scale <= 0
        used = torch.where(waiting, own.reciprocal(), scale), torch.where(waiting, own, inv_scale)
        if write:
            keep = ~waiting | ((amax_here > 0) & (amax_here < torch.inf))
            scale.copy_(torch.where(keep, used[0], NOT_YET))
            inv_scale.copy_(torch.where(keep, used[1], NOT_YET))
        return used[0].to(amax.device), used[1].to(amax.device)

    def record(self, row: int, amax: Tensor) -> None:
        """Take the amax [] of one tensor of `row` into this step. Costs no kernel: folded at the roll."""
        self._tell_what_is_lost()
        self._pending.append((row, amax))
        if len(self._pending) >= _FOLD_AFTER:
            self.fold()

    def fold(self) -> None:
        """Bring `amax_now` up to date with everything recorded."""
        if not self._pending:
            return
        rows, amaxes = zip(*self._pending, strict=True)
        self._pending = []
        device = self.scale.device
        values = torch.stack([amax.to(device) for amax in amaxes]).float()
        values = torch.where(values < torch.inf, values, NO_DATA)  # NaN compares false too
        self.amax_now.scatter_reduce_(0, self._index(rows), values, "amax")

    def roll(self) -> None:
        """End the step: amaxes enter the history, scales follow."""
        self.fold()
        self._over_ranks.reduce(self.amax_now)
        self.steps += 1
        tensors = (self.history, self.amax_now, self.scale, self.inv_scale)
        if self.scale.is_cuda and HAS_TRITON:
            self._rules = self._rules or rules_of(self._groups, self.scale.device)
            roll_at_once(*tensors, self._rules, self.steps)
        else:
            roll_by_groups(*tensors, [(group, self._index(tuple(group.rows))) for group in self._groups], self.steps)
        self._stop_waiting()

    def state(self, module: str) -> dict[str, Tensor]:
        """Return a copy of what the rows of `module` need: history, scale, inv_scale, amax_now, steps."""
        self.fold()
        first, shapes = self._saved_shapes(module)
        state = {name: getattr(self, name)[first : first + 3].clone() for name in shapes}
        state["history"] = state["history"][:, : shapes["history"][1]].clone()
        return {**state, "steps": torch.tensor(self.steps, device="cpu")}

    def load(self, module: str, state: dict[str, Tensor]) -> None:
        """Restore the rows of `module` from `state`; ShapeError if it was saved with another history."""
        self.check(module, state)
        self.fold()
        first, shapes = self._saved_shapes(module)
        for name, shape in shapes.items():
            getattr(self, name)[first : first + 3].narrow(-1, 0, shape[-1]).copy_(state[name])
        self.steps = int(state["steps"])
        still = (state["scale"] <= 0).tolist()
        self._waiting -= {first, first + 1, first + 2}
        self._waiting |= {first + i for i in range(3) if still[i]}

    def check(self, module: str, state: dict[str, Tensor]) -> None:
        """Raise ShapeError unless `state` fits the rows of `module`."""
        _, shapes = self._saved_shapes(module)
        for name, shape in {**shapes, "steps": []}.items():
            found = list(state[name].shape) if name in state else None
            if found != shape:
                raise ShapeError(
                    f"the saved scaling state of {module!r} has {name} {found}, expected {shape}; "
                    "convert with the recipe it was saved with, history included, or drop the saved state."
                )

    def reset(self, module: str) -> None:
        """Forget what the rows of `module` have seen, as after `add`: their weights were replaced."""
        fresh = ScaleTable(self.scale.device)
        fresh.add(module, self._recipe_of(self._first(module)))
        self.load(module, {**fresh.state(module), "steps": torch.tensor(self.steps, device="cpu")})

    def to(self, device: torch.device) -> None:
        """Move the table, as `Module.to` moves parameters."""
        if device != self.scale.device:
            self.fold()
            for name in ("history", "scale", "inv_scale", "amax_now", "scratch"):
                setattr(self, name, getattr(self, name).to(device))
            self._indices.clear()
            self._given.clear()
            self._rules = None

    def _tell_what_is_lost(self) -> None:
        if self.lost:
            name, self.lost = self.lost, ""
            warn_lost(name)

    def _stop_waiting(self) -> None:
        # Reading the table back would wait for the GPU: there it is asked after 1, 2, 4, 8, ... steps only.
        if self._waiting and (self.scale.device.type == "cpu" or self.steps & (self.steps - 1) == 0):
            scales = self.scale.tolist()
            self._waiting = {row for row in self._waiting if scales[row] <= 0}

    def _group(self, recipe: Recipe, operand: Operand) -> Group:
        for group in self._groups:
            if group.recipe == recipe and group.operand == operand:
                return group
        self._groups.append(Group(recipe, operand))
        return self._groups[-1]

    def _index(self, rows: tuple[int, ...]) -> Tensor:
        # The same rows come back every step: keep their index on the device instead of copying it there
        # again.
        if rows not in self._indices:
            if len(self._indices) > 64:
                self._indices.clear()
            self._indices[rows] = torch.tensor(rows, device=self.scale.device)
        return self._indices[rows]

    def _first(self, module: str) -> int:
        site = f"{module}:{ROLES[0]}"
        if site not in self.sites:
            modules = {name.rpartition(":")[0] for name in self.sites}
            raise ConversionError(f"no scaling state is kept for {module!r}; {nearest(module, modules)}")
        return self.sites.index(site)

    def _recipe_of(self, row: int) -> Recipe:
        return next(group.recipe for group in self._groups if row in group.rows)

    def _saved_shapes(self, module: str) -> tuple[int, dict[str, list[int]]]:
        """The first row of `module`, and what is saved of its three rows."""
        first = self._first(module)
        history = self._recipe_of(first).history
        return first, {"history": [3, history], "scale": [3], "inv_scale": [3], "amax_now": [3]}


def amax_ratio(amax: Tensor, scale: Tensor, operand: Operand) -> Tensor:
    """Return amax now over the amax that `scale` assumed; above 1, the tensor may saturate."""
    return amax / (scale * (operand.fmt.max * 2.0**-operand.margin))
