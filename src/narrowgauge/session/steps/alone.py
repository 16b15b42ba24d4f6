"""Backward passes and steps of optimizers while the program is left alone (`rest.py`): as little of each as can be.

Each function here is called between the program's own operations, where nothing of ours is in the processor's cache:
so what is mostly so is asked at once, and in one place, and anything else takes the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import NO_TASK, backward_task
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.hearing import Hearing, capturing, heard
from narrowgauge.session.steps.backward_losses import NEAR, BackwardLosses
from narrowgauge.session.steps.closures import Closures
from narrowgauge.session.steps.engines import EngineSteps
from narrowgauge.session.steps.ledger import add_loss, rates
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.looking import learning_rates, may_skip
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.zeroed import added, left

_NoFunctionModes, _modes = torch._C.DisableTorchFunction, torch._C._len_torch_dispatch_stack


class Followed(Protocol):
    """How far the program has come, whether it is left alone or not."""

    stepping: ReferenceType[Optimizer] | None
    stepped_in_backward: bool
    ended: int
    prepares: int
    losses: BackwardLosses
    closures: Closures
    engines: EngineSteps
    follows: Callable[[Optimizer], bool]
    others: Callable[[Any], bool]


class UpdatesAlone:
    """Those of one program.

    Args:
        steps, hearing: the session's.
        updates: who follows them where the program is not left alone.

    Attributes:
        others: models are trained beside the one that is watched; then whose a backward pass is and a step is asked.
        theirs: the backward pass that runs is others'.
        scales: a gradient scaler multiplies losses.
        hook: what optimizers' ended steps are told, if anything is.
    """

    def __init__(self, steps: Steps, hearing: Hearing, updates: Followed) -> None:
        self._steps, self.hearing, self._updates = steps, hearing, updates
        self.resting = steps.resting
        self.others = self.theirs = self.scales = False
        self.hook: Callable[[Optimizer, bool], None] | None = None

    def interrupted(self) -> None:
        """What stands in a place is not what was put there: what is known of the step that is made is in its line."""
        self._steps.usual.interrupted()

    @partial(passed_over, below=True)
    def backward_begins(self, loss: Any) -> bool:
        """`backward` is called on `loss`; whether the long way is not to be told."""
        if self.hearing.ident != get_ident() or backward_task() != NO_TASK:
            return False
        rest = self._steps.rest
        if self.others and self.is_of_others(loss):
            self.theirs = True
            return True
        if rest.parted:
            self._parted()
            return False
        self.hearing.waits = True
        if not self._updates.closures.depth:
            self._updates.stepping = None
        if not rest.called:
            self.resting.called()
        if (line := rest.line) is not None:
            line.backwards += 1
            if self.resting.tries:
                line.elsewhere += 1
                line.tried += 1
                return True
            with _NoFunctionModes():
                plain = type(loss) is Tensor and loss.dtype is torch.float32 and not loss.dim()
                if plain and (loss.is_cpu or loss.is_cuda) and line.backwards == 1 and not _modes():
                    losses = self._updates.losses  # as `add_loss` does, at once
                    if not losses.scales:
                        line.loss = loss.item() if loss.is_cpu else loss.detach().clone()
                        return True
                    if latest := losses.latest:
                        after, before, scale, version, _ = latest[-1]
                        same = loss._version == version and after() is loss
                        if same and before.device == loss.device and before.dtype is torch.float32 and not before.dim():
                            line.loss = before.item() if before.is_cpu else before.clone()
                            line.scalars["loss_scale"] = scale
                            return True
            self.loss(line, loss)
        return True

    @heard
    def loss(self, line: Line, loss: Any) -> None:
        """`backward` is called on this in the step of the line."""
        if self.resting.careful and added(line):
            self._steps.thrown_away += left(line, but=1)
        if self._updates.closures.again:
            line.elsewhere += 1
            line.tried += 1
            return
        number = self._updates.losses.number(loss)
        if number is None:
            line.vectors += 1
        elif line.loss is not None or line.backwards == line.elsewhere + line.vectors + 1:
            add_loss(line, number)
        else:  # not all of the step's are known
            line.loss = None

    @partial(passed_over, below=True)
    def backward_ended(self, *, failed: bool = False) -> None:
        """Such a backward returned, or `failed`."""
        if self.theirs:
            self.theirs = False
            self._updates.losses.forget()
            return
        self.hearing.waits = self._updates.stepped_in_backward = False
        rest, losses = self._steps.rest, self._updates.losses
        if losses.scales:
            losses.forget()
        if (line := rest.line) is None:
            return
        if failed:
            line.loss = None
        closures = self._updates.closures
        if "lr" in line.scalars and not (closures.depth or closures.again):  # called by the step, which may set them
            rates(line, *rest.makers)

    @heard
    def is_of_others(self, loss: Any) -> bool:
        """Whether gradients of it reach other models alone."""
        return self._updates.others(loss)

    @heard
    def _parted(self) -> None:
        self.resting.parted()

    @passed_over
    def scaled(self, scaler: Any, before: Any, after: Any) -> bool:
        """A gradient scaler multiplied a loss, or handed it back; whether the long way is not to be told."""
        hearing, losses = self.hearing, self._updates.losses
        scale = getattr(scaler, "_scale", None)
        if after is before and scale is None:
            return True
        if type(after) is not Tensor or type(before) is not Tensor or not hearing.plainly():
            return False
        with _NoFunctionModes():
            node = after.grad_fn
            if node is None or before.numel() != 1:  # it would be held for longer than where all is followed
                return False
            if type(scale) is not Tensor or scale.numel() != 1 or len(losses.latest) >= NEAR:
                return False
            known = scale.item() if scale.is_cpu else scale.detach().clone()  # of a GPU nobody waits for it
            name = node._sequence_nr(), node.name()  # as `name_of` has it
            losses.latest.append((ref(after), before.detach(), known, after._version, name))
        losses.scales = True
        if not self.scales:
            self.scales = True
            self._steps.usual.over()
        return True

    def step_begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step; whether the long way is not to be told."""
        if self.hearing.ident != get_ident() or backward_task() != NO_TASK:
            return False
        updates = self._updates
        if updates.prepares or (self.others and not updates.follows(optimizer)):
            return True
        if updates.stepping is None or updates.stepping() is None:
            updates.stepping = ref(optimizer)
            if (line := self._steps.rest.line) is not None:  # of rates, which it may change as it steps
                self._rates(line, optimizer)
                if getattr(optimizer, "found_inf", None) is not None:
                    self._may_skip(line, optimizer)
        return True

    @heard
    def _may_skip(self, line: Line, optimizer: Optimizer) -> None:
        may_skip(line, optimizer)

    def closure(self, closure: Any, optimizer: Optimizer) -> Any:
        """What such an optimizer is to call in the place of its closure, of which nobody knows how often it will."""
        updates, line = self._updates, self._steps.rest.line
        if self.others and not updates.follows(optimizer):
            return closure
        if updates.stepping is not None and updates.stepping() is not optimizer:  # the one around it is followed
            return closure
        closures = updates.closures
        if closures.again:  # its step before has raised behind the closure's first call
            closures.again = False
            if line is not None:
                line.loss, line.elsewhere, line.vectors = None, line.backwards, 0
        return closures.followed(closure, optimizer) if callable(closure) else closure

    def evaluated(self, optimizer: Optimizer) -> None:
        """Its closure has returned for the first time in a step, and may have set rates that were known."""
        if (line := self._steps.rest.line) is None:
            return
        for group in optimizer.param_groups:
            line.rates.pop(id(group), None)
        for name in [name for name in line.scalars if name.startswith("lr")]:
            del line.scalars[name]
        self._rates(line, optimizer)

    def _rates(self, line: Line, optimizer: Optimizer) -> None:
        at_once = len(self._steps.rest.team) == 1 and not self._updates.engines.alone  # not group by group
        (rates if at_once else learning_rates)(line, optimizer)

    def step_ended(self, optimizer: Optimizer) -> bool:
        """An optimizer stepped; whether the long way is not to be told."""
        updates = self._updates
        if updates.engines.alone and updates.engines.noted(optimizer):
            return True
        mine = not updates.prepares and updates.stepping is not None and updates.stepping() is optimizer
        made = False
        if mine and self.hearing.plainly():
            steps = self._steps.ledger.steps
            try:
                made = self._steps.usual.made(optimizer)
            except Exception as error:  # in what became of earlier rows
                self.hearing.kept("step_ended", error)
                made = self._steps.ledger.steps > steps
        if made:
            updates.ended += 1
            updates.stepping, updates.closures.again = None, False
            return True
        within = backward_task() != NO_TASK
        if capturing() or not (self.hearing.mine() if within else self.hearing.ident == get_ident()):
            return False
        self._stepped(optimizer, within)
        return True

    @heard
    def _stepped(self, optimizer: Optimizer, within: bool) -> None:
        updates, steps = self._updates, self._steps
        if updates.prepares or not updates.follows(optimizer):
            return
        if within:  # all of one backward are one step, and the others of this one are heard
            updates.stepped_in_backward = True
            steps.left_alone(optimizer, within=True)
            self.resting.unlike(optimizer)
            return
        updates.ended += 1
        if updates.stepping is not None and updates.stepping() not in (None, optimizer):
            return
        updates.stepping, updates.closures.again = None, False
        by_engine = steps.rest.on and steps.rest.by_engine
        steps.left_alone(optimizer)
        if by_engine and steps.rest.on:  # which did not make this one: the optimizer may go on with another group
            self.resting.unlike(optimizer)
