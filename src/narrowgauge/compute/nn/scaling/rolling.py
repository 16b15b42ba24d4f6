"""Rolling a table of scales at the end of a step: by groups of rows with ordinary operations, or all in one launch.

Both do the same to the last bit; see `scale_table` for what and why.

Legend: S = sites, H = history.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.quant import inv_scale_from_amax
from narrowgauge.compute.recipes import Operand, Recipe

HAS_TRITON = importlib.util.find_spec("triton") is not None
NO_DATA = -1.0


@dataclass
class Group:
    """The rows that share a rule."""

    recipe: Recipe
    operand: Operand
    rows: list[int] = field(default_factory=list)

    @property
    def every(self) -> int:
        """The scales change in the steps that this divides; 0 is never."""
        return self.recipe.refresh_every if self.recipe.state == "static" else 1

    @property
    def window(self) -> int:
        """How many steps the assumed amax looks back on."""
        return self.recipe.history if self.recipe.algorithm == "max" else 1


def roll_by_groups(
    history: Tensor,
    amax_now: Tensor,
    scale: Tensor,
    inv_scale: Tensor,
    groups: Sequence[tuple[Group, Tensor]],
    steps: int,
) -> None:
    """Roll history [S, H]; amax_now, scale and inv_scale [S] follow, in place. Each group comes with its rows [R]."""
    seen = amax_now >= 0
    rolled = torch.cat([amax_now.unsqueeze(1), history[:, :-1]], dim=1)
    history.copy_(torch.where(seen.unsqueeze(1), rolled, history))
    amax_now.fill_(NO_DATA)
    for group, rows in groups:
        if not group.every or steps % group.every:
            continue
        operand = group.operand
        assumed = history[rows, : group.window].amax(dim=1)
        fresh = inv_scale_from_amax(assumed, operand.fmt, operand.scaling, operand.margin)
        scale[rows] = torch.where(assumed > 0, fresh.reciprocal(), scale[rows])
        inv_scale[rows] = torch.where(assumed > 0, fresh, inv_scale[rows])


def roll_at_once(*tensors: Any) -> None:
    """`kernels.fused.roll.roll`, imported when first needed: triton is slow to import."""
    from narrowgauge.compute.kernels.fused.roll import roll

    roll(*tensors)


def rules_of(groups: Sequence[Group], device: torch.device) -> Any:
    """The rule of every row of these groups, as that kernel takes them."""
    from narrowgauge.compute.kernels.fused.roll import RollRules

    rows = [group for _, group in sorted(((row, group) for group in groups for row in group.rows), key=itemgetter(0))]
    operands = [group.operand for group in rows]
    floats = partial(torch.tensor, dtype=torch.float32, device=device)
    integers = partial(torch.tensor, dtype=torch.int32, device=device)
    return RollRules(
        goal=floats([operand.fmt.max * 2.0**-operand.margin for operand in operands]),
        floor=floats([operand.scaling.amax_floor for operand in operands]),
        window=integers([group.window for group in rows]),
        every=integers([group.every for group in rows]),
        pow2=integers([int(operand.scaling.power_of_two) for operand in operands]),
    )
