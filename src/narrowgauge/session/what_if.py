"""What other recipes would make of every recorded operand: FP8 readiness, before anyone switches.

    operand x [M, K]  ->  quantized by each recipe's rule for its role, counted, thrown away
    experts [E, N, K] ->  each expert by itself
    RUN/what_if/NAME/     a run of its own for each recipe, with the same steps and sites: what reads runs reads these

Delayed and static recipes assume an amax: of the recorded steps before (delayed: the largest of the last `history`
of them; static: the first). So they are as good as recording is often: `every = 1` shows what they would do.

Legend: M = rows, K = columns, E = experts, N = rows of each.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.quant import QTensor, quantize
from narrowgauge.compute.recipes import ROLES, Recipe, by_name
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.selection.selection import Columns, Selection
from narrowgauge.session.sites.experts import of_stack, quantize_experts

FOLDER = "what_if"


def judge_of(names: Sequence[str]) -> str:
    """The recipe whose rows are the run's own: the first that keeps no state, `current` if all do; "" of none.

    >>> judge_of(["delayed", "blockwise"])
    'blockwise'
    """
    return next((name for name in names if by_name(name).state == "none"), "current" if names else "")


@dataclass
class Judge:
    """One recipe at work, and where its rows go."""

    recipe: Recipe
    writer: RunWriter
    collector: Collector
    seen: dict[str, deque[Tensor]] = field(default_factory=dict)  # amaxes of the steps before, by site
    now: dict[str, Tensor] = field(default_factory=dict)  # of the open step

    def end_step(self) -> None:
        """What the step showed is history."""
        self.collector.end_step()
        for site, amax in self.now.items():
            history = self.seen.setdefault(site, deque(maxlen=self.recipe.history))
            if self.recipe.state == "delayed" or not history:
                history.append(amax)
        self.now.clear()

    def counted(self, module: str, role: str, x: Tensor) -> bool:
        """Whether x [M, K] was counted as it is: scales of its own, and a device on which that needs no codes."""
        if self.recipe.state != "none" or x.dim() != 2:
            return False
        return self.collector.judge(module, role, x, self.recipe.uses(role)[0])  # type: ignore[arg-type]

    def quantized(self, site: str, role: str, x: Tensor) -> tuple[QTensor, Tensor | None]:
        """The codes of x [M, K] or [E, N, K], and its amax over the one that the recipe assumed (experts: the most)."""
        rule = self.recipe.uses(role)[0]  # type: ignore[arg-type]
        stacked = x.dim() == 3
        if self.recipe.state == "none":
            if stacked:
                return quantize_experts(x, rule), None
            return quantize(x, rule.fmt, rule.granularity, scaling=rule.scaling, margin=rule.margin), None
        grain = of_stack(rule.granularity, x) if stacked else rule.granularity
        amax = grain.amax(x.reshape(-1, x.shape[-1]))
        usable = torch.where(amax < torch.inf, amax, 0.0)
        self.now[site] = torch.maximum(self.now[site], usable) if site in self.now else usable
        before = self.seen.get(site)
        window = list(before)[-self.recipe.history :] if before else []
        assumed = torch.stack(window).amax(0) if window else amax
        q = quantize(x, rule.fmt, grain, scaling=rule.scaling, margin=rule.margin, amax=assumed)
        return q, (amax / assumed).amax()


class WhatIf:
    """All recipes that are asked about, beside the one whose rows are the run's own.

    Args:
        names: the recipes.
        writer: the run's; theirs write into folders below its own.
        selection: the sites and metrics.
    """

    def __init__(self, names: Sequence[str], writer: RunWriter, selection: Selection) -> None:
        self._names, self._writer, self._selection = tuple(names), writer, selection
        self._judges: list[Judge] = []
        self._weights: set[str] = set()  # seen in the open step
        self._open = False
        self.problem = ""
        self.seconds = 0.0
        # Now, and not when something is recorded: a writer that is made after the session's own goodbye to the process
        # is registered would say its own before, and miss the last step.
        try:
            self._judges = [self._judge(name) for name in self._names]
        except (NarrowgaugeError, OSError) as error:
            self._failed(error)

    def begin_step(self, step: int, recorded: bool) -> None:
        """Open a step if it is `recorded`."""
        self.end_step()
        self._open = recorded and bool(self._names) and not self.problem
        if not self._open:
            return
        for judge in self._judges:
            judge.collector.begin_step(step)

    def wants(self) -> bool:
        """Whether the open step is looked at."""
        return self._open

    @torch.no_grad()
    def operand(self, module: str, role: str, x: Tensor) -> None:
        """See an operand x [M, K], or the weights [E, N, K] of experts."""
        site, began = f"{module}:{role}", time.perf_counter()
        if not self._open or role not in ROLES or not x.numel() or site in self._weights:
            return
        if role == "weight":
            self._weights.add(site)
        try:
            for judge in self._judges:
                if not judge.counted(module, role, x):
                    codes, ratio = judge.quantized(site, role, x)
                    judge.collector.operand(module, role, x, codes, amax_ratio=ratio)
        except Exception as error:
            self._failed(error)
        self.seconds += time.perf_counter() - began

    def end_step(self) -> None:
        """The step ended."""
        self._open = False
        self._weights.clear()
        for judge in self._judges:
            judge.end_step()

    def drop_step(self) -> None:
        """The open step is none."""
        for judge in self._judges:
            judge.collector.drop_step()

    def begin_anew(self) -> None:
        """What was seen in the open step so far was none of it."""
        for judge in self._judges:
            judge.collector.begin_anew()

    def close(self) -> None:
        """The program ended: write everything."""
        self.end_step()
        for judge in self._judges:
            judge.collector.flush()
            judge.writer.close()
        self._judges = []

    def facts(self) -> dict[str, Any]:
        """Which recipes, and what asking cost the training thread."""
        return {"recipes": list(self._names), "seconds": self.seconds}

    def _judge(self, name: str) -> Judge:
        meta = {"variant": name, "what_if": True}
        writer = RunWriter(self._writer.path / FOLDER / name, meta, rank=self._writer.rank)
        return Judge(by_name(name), writer, Collector(Columns(writer, self._selection), every=1))

    def _failed(self, error: Exception) -> None:
        self._open = False
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        self.problem = self.problem or f"watch.what_if: it ended early, and rows of it are missing: {cause}"
