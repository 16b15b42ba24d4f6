"""Whoever looks at tensors in a session: the run's statistics, of what the settings select.

layers -> Recorder -> selected -> Collector -> selected columns -> the run
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowgauge.compute.nn.observer import GemmSample
from narrowgauge.compute.quant import QTensor
from narrowgauge.compute.recipes import Operand
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.plan import Plan
from narrowgauge.session.selection import Columns, Selection


class Recorder:
    """An Observer for all layers of a program, and the beginnings and ends of its steps."""

    def __init__(self, plan: Plan, writer: RunWriter) -> None:
        self.selection = Selection(plan.watch, plan.every)
        self.collector = Collector(Columns(writer, self.selection), every=plan.every, due=self.selection.due)

    def begin_step(self, step: int) -> bool:
        """Open a step; True if anything is looked at in it."""
        return self.collector.begin_step(step)

    def end_step(self) -> None:
        """The step ended."""
        self.collector.end_step()

    def flush(self) -> None:
        """The program ended: wait until everything is with the writer."""
        self.collector.flush()

    @property
    def notes(self) -> list[str]:
        """What the settings ask for and this program has not."""
        return self.selection.notes()

    def selects(self, module: str, role: str) -> bool:
        """Whether one tensor of a module is looked at in the open step."""
        return self.collector.wants(module) and self.selection.sites.selects(module, role)

    def wants(self, module: str) -> bool:
        """Whether any tensor of a module may be looked at in the open step."""
        return self.collector.wants(module) and self.selection.sites.reaches(module)

    def look(self, module: str, role: str, x: Tensor, rule: Operand) -> Any | None:
        """Room for what a kernel counts of an operand that is selected."""
        return self.collector.look(module, role, x, rule) if self.selects(module, role) else None

    def operand(
        self,
        module: str,
        role: str,
        x: Tensor,
        q: QTensor,
        moments: Tensor | None = None,
        amax_ratio: Tensor | None = None,
    ) -> None:
        """Pass on what is selected."""
        if self.selects(module, role):
            self.collector.operand(module, role, x, q, moments, amax_ratio)

    def result(self, module: str, role: str, y: Tensor, check: GemmSample | None) -> None:
        """Pass on what is selected."""
        if self.selects(module, role):
            self.collector.result(module, role, y, check)
