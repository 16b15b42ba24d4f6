"""One recipe that looks at operands for somebody who does not train by it.

    operand x [M, K]  ->  quantized by the recipe's rule for its role, counted, thrown away
    experts [E, N, K] ->  each expert by itself

Delayed and static recipes assume an amax: of the recorded steps before (delayed: the largest of the last `history`
of them; static: the first tensor's). So they are as good as recording is often: `every = 1` shows what they would do.
As where such a recipe trains (compute/nn/scaling/scale_table.py), zeros and what is not finite assume nothing: until
something else was seen, a tensor's own amax is taken, and of the first one it is kept for the rest of the step.

Legend: M = rows, K = columns, E = experts, N = rows of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge.compute.nn.scaling.rolling import NO_DATA
from narrowgauge.compute.quant import QTensor, quantize
from narrowgauge.compute.quant.quantize import scales_for
from narrowgauge.compute.recipes import Recipe
from narrowgauge.observe.stats import Collector
from narrowgauge.session.sites.experts import of_stack, quantize_experts


@dataclass
class Judge:
    """One recipe at work, and where its rows go."""

    recipe: Recipe
    collector: Collector
    seen: dict[str, Tensor] = field(default_factory=dict)  # [steps, ...] amaxes of those before, by site
    now: dict[str, Tensor] = field(default_factory=dict)  # of the open step; NO_DATA: none that is finite
    assumed: dict[str, Tensor] = field(default_factory=dict)  # what scales are made for; 0: nothing yet

    def end_step(self) -> None:
        """What the step showed is history."""
        self.collector.end_step()
        if self.recipe.state == "delayed":
            for site, amax in self.now.items():
                history, none = self.seen.get(site, amax.new_zeros(0, *amax.shape)), torch.zeros_like(amax)[None]
                # All at once, as a GPU is not asked: a step without data takes no place, and zeros behind are neutral.
                rolled, kept = torch.cat([amax[None], history]), torch.cat([history, none])
                self.seen[site] = torch.where(amax >= 0, rolled, kept)[: self.recipe.history]
                largest = self.seen[site].amax(0)
                self.assumed[site] = torch.where(largest > 0, largest, self.assumed[site])
        self.now.clear()

    def drop_step(self) -> None:
        """The open step is none."""
        self.collector.drop_step()
        self.now.clear()

    def begin_anew(self) -> None:
        """What was seen in the open step so far was none of it."""
        self.collector.begin_anew()
        self.now.clear()

    def counted(self, module: str, role: str, x: Tensor) -> bool:
        """Whether x [M, K] was counted as it is: scales of its own, and a device on which that needs no codes."""
        if self.recipe.state != "none" or x.dim() != 2:
            return False
        return self.collector.judge(module, role, x, self.recipe.uses(role)[0])  # type: ignore[arg-type]

    def quantized(self, site: str, role: str, x: Tensor) -> tuple[QTensor, Tensor | None]:
        """The codes of x [M, K] or [E, N, K], and its amax over the one that the recipe assumed.

        Of experts it is the most of theirs; -inf if there is none.
        """
        rule = self.recipe.uses(role)[0]  # type: ignore[arg-type]
        stacked = x.dim() == 3
        if self.recipe.state == "none":
            if stacked:
                return quantize_experts(x, rule), None
            return quantize(x, rule.fmt, rule.granularity, scaling=rule.scaling, margin=rule.margin), None
        grain = of_stack(rule.granularity, x) if stacked else rule.granularity
        amax = grain.amax(x.reshape(-1, x.shape[-1]))
        finite = amax < torch.inf
        stored = torch.where(finite, amax, NO_DATA)
        self.now[site] = torch.maximum(self.now[site], stored) if site in self.now else stored
        before = self.assumed.get(site, torch.zeros_like(amax))
        self.assumed[site] = torch.where(before > 0, before, torch.where(finite, amax, 0.0))
        assumed = torch.where(before > 0, before, amax)
        scale, inv_scale = scales_for(assumed, rule.fmt, rule.scaling, rule.margin)
        q = quantize(x, rule.fmt, grain, scale=scale, inv_scale=inv_scale, amax=amax)
        return q, torch.where(finite & (assumed > 0), amax / assumed, -torch.inf).amax()
