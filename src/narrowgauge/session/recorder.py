"""Whoever looks at tensors in a session: the run's statistics and dumps, of what the settings select.

layers -> Recorder -> selected -> Collector -> selected columns -> the run
                   -> chosen   -> Dumper                        -> its dumps
                   -> selected -> WhatIf, recipe by recipe      -> runs below the run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from torch import Tensor, nn

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.nn.observer import GemmSample
from narrowgauge.compute.quant import QTensor
from narrowgauge.compute.recipes import Operand
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.stats.again import Again
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.dumps import Dumper
from narrowgauge.session.plan import Plan
from narrowgauge.session.selection.selection import Columns, Selection
from narrowgauge.session.selection.unmet import unjudged
from narrowgauge.session.sites.numbering import Numbering, numbering
from narrowgauge.session.sites.part import named
from narrowgauge.session.what_if import WhatIf


class Recorder:
    """An Observer for all layers of a program, and the beginnings and ends of its steps.

    `name` says what a module that it is told of is called in the run: two models may both have a layer "0".
    """

    def __init__(self, plan: Plan, writer: RunWriter) -> None:
        self._plan = plan
        self._prefix, self._numbering = "", Numbering()
        self._names: dict[str, str] = {}
        self.mine: Callable[[], bool] = lambda: True  # whether what the calling thread multiplies is of the training
        self._views = {(self._prefix, self._numbering): self}
        self.selection = Selection(plan.watch, plan.every)
        columns = Columns(lambda: writer, self.selection)
        self.collector = Collector(columns, every=plan.every, due=self.selection.due)
        self.dumper: Dumper | None = None
        if plan.dump:
            about = {
                "converted_to": plan.recipe or "",
                "plain_layers_by": plan.judge,
                "command": " ".join(plan.command),
            }
            self.dumper = Dumper(plan.dump, writer, writer.path, writer.rank, about)
        self.what_if: WhatIf | None = None
        if plan.what_if:
            self.what_if = WhatIf(plan.what_if, writer, self.selection, seldom=plan.seldom)

    def under(self, prefix: str, model: nn.Module) -> Recorder:
        """The same for the layers of a model, whose names get `prefix` in front, and numbers of the whole model."""
        key = prefix, numbering(model)
        if key not in self._views:
            self._views[key] = view = copy(self)
            view._prefix, view._numbering = key
            view._names = {}
        return self._views[key]

    def name(self, module: str) -> str:
        """A module's name in the run."""
        known = self._names.get(module)
        if known is None:
            known = self._names[module] = named(self._prefix, self._numbering(module))
        return known

    def begin_step(self, step: int) -> bool:
        """Open a step; True if anything is looked at in it."""
        recorded = self.collector.begin_step(step)
        if self.what_if is not None:
            self.what_if.begin_step(step, recorded)
        dumped = self.dumper is not None and self.dumper.begin_step(step)
        self.selection.gate.asked = dumped or (self.what_if is not None and self.what_if.asking)
        return dumped or recorded

    def next_due(self, step: int) -> int | None:
        """The next step in which anything is looked at; None without one."""
        dumped = None if self.dumper is None else self.dumper.next_due(step)
        return min((at for at in (self.selection.next_due(step), dumped) if at is not None), default=None)

    def made(self, steps: int) -> None:
        """The program made so many steps, of the last ones of which nobody was told."""
        self.selection.made(steps)
        if self.dumper is not None:
            self.dumper.made(steps)

    def passed(self, last: Mapping[int, int], gaps: Mapping[int, int]) -> None:
        """Steps were made of which nobody was told; these are the last ones of optimizers, by their ids, and the most
        steps from one of theirs to their next."""
        self.selection.passed(last, gaps)

    def end_step(self) -> None:
        """The step ended."""
        if self.what_if is not None:  # its rows first: with several ranks, they go with the step's own
            self.what_if.end_step()
        self.collector.end_step()
        if self.dumper is not None:
            self.dumper.end_step()

    def drop_step(self) -> None:
        """The open step will never be one: it leaves no rows. A dump is of tensors, not of a step, and is written."""
        self.collector.drop_step()
        if self.what_if is not None:
            self.what_if.drop_step()

    def begin_anew(self) -> None:
        """What was seen in the open step so far was none of it, and leaves no rows."""
        self.collector.begin_anew()
        if self.what_if is not None:
            self.what_if.begin_anew()

    def flush(self) -> None:
        """The program ended: wait until everything is with the writer."""
        self.end_step()
        self.collector.flush()
        if self.what_if is not None:
            self.what_if.close()
        if self.dumper is not None:
            self.dumper.flush()

    @property
    def notes(self) -> list[str]:
        """What the settings ask for and this program has not."""
        notes = [*self.selection.notes(), *(self.dumper.notes() if self.dumper is not None else ())]
        if self.selection.missed or (self.dumper is not None and self.dumper.missed):
            notes += unjudged(self._plan)
        return [*notes, self.what_if.problem] if self.what_if is not None and self.what_if.problem else notes

    def facts(self) -> dict[str, Any]:
        """What looking cost, for the run's metadata."""
        return {
            "seconds": self.collector.seconds,
            **({"steps_by_passes": self.collector.by_passes} if self.collector.by_passes else {}),
            **({"dumps": self.dumper.facts()} if self.dumper is not None else {}),
            **({"what_if": self.what_if.facts()} if self.what_if is not None else {}),
        }

    def selects(self, module: str, role: str) -> bool:
        """Whether one tensor of a module is looked at in the open step."""
        if self.selection.gate.paused:
            return False
        module = self.name(module)
        if self.collector.wants(module) and self.selection.sites.selects(module, role):
            return True
        return self.dumper is not None and self.dumper.selects(module, role)

    def wants(self, module: str) -> bool:
        """Whether any tensor of a module may be looked at in the open step."""
        module = self._names.get(module) or self.name(module)
        if self.selection.gate.paused or not self.mine():
            return False
        recorded = self.collector.wants(module) and self.selection.sites.reaches(module)
        return recorded or (self.dumper is not None and self.dumper.wants(module))

    def look(self, module: str, role: str, x: Tensor, rule: Operand, turned: bool) -> Any | None:
        """Room for what a kernel counts of an operand that is selected."""
        module = self.name(module)
        if self.dumper is not None and self.dumper.selects(module, role):
            return None  # a kernel that counts shows no codes
        if self.what_if is not None and self.what_if.wants():
            return None  # nor what it quantized
        return self.collector.look(module, role, x, rule, turned) if self._records(module, role) else None

    def product(
        self, module: str, role: str, x: Tensor, rule: Operand, given: Given | None = None, *, own: bool = False
    ) -> bool:
        """An operand [M, K] of a product outside of our layers, and what `rule` would make of it, without making that.

        All that is wanted of it is seen to, also what `unconverted` asks, unless the rule is the layer's `own`. False
        where somebody has to quantize and to show it.
        """
        if self.selection.gate.paused:
            return True
        module = self._names.get(module) or self.name(module)
        dumped = self.dumper is not None and self.dumper.selects(module, role)
        if dumped or not self.selection.sites.selects(module, role):
            return not dumped
        if not self.collector.judge(module, role, x, rule, given):
            return False
        what_if = self._asking(own)
        if what_if is not None:
            what_if.operand(module, role, x)
        return True

    def again(
        self, module: str, role: str, x: Tensor, rule: Operand, given: Given | None, came: Tensor, *, own: bool = False
    ) -> Again | None:
        """A shorter `product`, in later steps too, for tensors of one site that lie in memory as the one that `came`.

        As `Collector.again` has it: where what is returned says False, `product` is to be asked.
        """
        module = self._names.get(module) or self.name(module)
        if self.selection.gate.paused or not self.selection.sites.selects(module, role):
            return None
        what_if = self._asking(own)
        if what_if is not None and not what_if.knows(module, role, x):
            return None
        return self.collector.again(module, role, x, rule, given, came=came, gate=self.selection.gate)

    def unconverted(self, module: str, role: str, x: Tensor) -> None:
        """An operand of a product that nobody converted was seen: what would it be by other recipes?"""
        if self.what_if is not None and self.what_if.seldom:
            module = self.name(module)
            if self._records(module, role):
                self._ask(module, role, x, seldom=True)

    def operand(
        self,
        module: str,
        role: str,
        x: Tensor,
        q: QTensor,
        moments: Tensor | None = None,
        amax_ratio: Tensor | None = None,
    ) -> None:
        """Pass on what is selected: x [M, K], or the weights [E, N, K] of experts with the codes of their rows."""
        module = self.name(module)
        if self._records(module, role):
            self.collector.operand(module, role, x, q, moments, amax_ratio)
            self._ask(module, role, x, seldom=False)
        if self.dumper is not None and not self.selection.gate.paused:
            self.dumper.operand(module, role, x.reshape(-1, x.shape[-1]), q)

    def result(self, module: str, role: str, y: Tensor, check: GemmSample | None) -> None:
        """Pass on what is selected."""
        module = self.name(module)
        if self._records(module, role):
            self.collector.result(module, role, y, check)

    def _asking(self, own: bool) -> WhatIf | None:
        """Who asks what a tensor would be by other recipes, if anybody does; seldom not of one with its layer's own."""
        return None if self.what_if is None or (own and self.what_if.seldom) else self.what_if

    def _ask(self, module: str, role: str, x: Tensor, *, seldom: bool) -> None:
        if self.what_if is not None and self.what_if.seldom == seldom:
            self.what_if.operand(module, role, x)

    def _records(self, module: str, role: str) -> bool:
        selection = self.selection
        return not selection.paused and self.collector.wants(module) and selection.sites.selects(module, role)
