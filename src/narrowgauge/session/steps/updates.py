"""From a loss to new weights: what `backward` is called on, and what optimizers do with the gradients.

scale(loss)          a gradient scaler's loss is known before it was scaled
backward(loss)       one microbatch; if it raises, it was none
zero_grad()          of all gradients, before a step was made of them: if a call with other data follows, they were none
clip_grad_norm_      the program's own norm, from before clipping; of several clips since the last step, of all
optimizer.step       learning rates, norms; the step is made
scaler.step          made, or skipped

step(closure)        the step begins with the closure's first call (closures.py)
step in backward     one optimizer per parameter, stepped by hooks: all of one backward are one step
step in a step       an optimizer that wraps another: the outer one counts
step after step      by the same optimizer, each time with other parameters (ZeRO, group by group): one step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.hearing import Hearing, heard, heard_if
from narrowgauge.session.same_weights import SameWeightsProbe
from narrowgauge.session.steps import pace
from narrowgauge.session.steps.alone import UpdatesAlone
from narrowgauge.session.steps.backward_losses import BackwardLosses
from narrowgauge.session.steps.clips import Clips
from narrowgauge.session.steps.closures import Closures
from narrowgauge.session.steps.engines import EngineSteps
from narrowgauge.session.steps.looking import learning_rates, left_out, look
from narrowgauge.session.steps.same_training import SameTraining
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.trained import parameters
from narrowgauge.session.steps.zeroed import counted, failed

PIPELINE = "the program trains a pipeline"


class Updates:
    """Follows the backward passes and optimizers of one program.

    Args:
        steps, probe, hearing, same: the session's.
        follows: whether an optimizer is one of those that train.
        in_parts: whether other ranks hold more of what it trains.
        trained: the parameters of all of them.
        others: whether gradients of a loss reach other models alone than the one that is watched.
        others_hold: whether these do the parameters with such ids.
    """

    def __init__(
        self,
        steps: Steps,
        probe: SameWeightsProbe | None,
        hearing: Hearing,
        same: SameTraining,
        follows: Callable[[Optimizer], bool] = lambda optimizer: True,
        in_parts: Callable[[Optimizer], bool] = lambda optimizer: False,
        trained: Callable[[], Iterable[Tensor]] = tuple,
        others: Callable[[Any], bool] = lambda loss: False,
        others_hold: Callable[[frozenset[int]], bool] = lambda parameters: False,
    ) -> None:
        self._steps, self._probe, self.hearing, self.same, self.follows = steps, probe, hearing, same, follows
        self._in_parts, self._trained, self.others, self._others_hold = in_parts, trained, others, others_hold
        self._of_others = False  # the backward pass that runs is
        self._clips = Clips()  # since the last step
        self.stepping: ReferenceType[Optimizer] | None = None  # whose step has begun
        self.closures = Closures(steps, self._evaluated)
        self.stepped_in_backward = False
        self.prepares = 0  # above 0: what steps now only makes its state
        self.staged = 0  # above 0: backward goes through a stage of a pipeline, whose last one has the microbatches
        self.backwards = 0
        self.ended = 0  # steps that optimizers made
        self._summands = self._sparse = 0  # gradients of a step whose norm is in none, at most
        self.losses = BackwardLosses(steps)
        self.engines = EngineSteps(steps, hearing, self)
        self.alone = UpdatesAlone(steps, hearing, self)

    @heard_if(lambda self, scaler, before, after: self.same.loss(before))
    def loss_scaled(self, scaler: Any, before: Any, after: Any) -> None:
        """A gradient scaler multiplied the loss."""
        self.losses.multiplied(before, after, getattr(scaler, "_scale", None))

    @heard
    def loss_multiplied(self, before: Any, after: Any, scale: Callable[[], float | Tensor | None]) -> None:
        """An engine multiplied the loss by a scale of its own, if there is one."""
        self.losses.multiplied(before, after, scale())

    @heard_if(lambda self, loss, plain: self.same.loss(loss))
    def backward_begins(self, loss: Any, plain: bool) -> None:
        """`backward` is called on `loss`."""
        self._of_others = False
        if self.losses.estimate(loss):
            return
        if self.others(loss):
            self._of_others = True
            return
        self.backwards += 1
        if not self.closures.depth:
            self.stepping = None  # an optimizer that was stepping has raised
        self.hearing.waits = True
        self._steps.enter(usual=True)
        if self._steps.rest.on:  # since now: the step begins with this
            if (line := self._steps.rest.line) is not None:
                line.backwards += 1
                self.alone.loss(line, loss)
            return
        if (line := self._steps.ledger.line) is not None:
            line.backwards += 1
        self._steps.backward_begins()
        self._clips.grown()
        if not self.closures.again:
            number = self.losses.add(loss, staged=self.staged > 0)
            self._steps.evals.trains_by.backward(loss, number)
        elif line is not None:
            line.elsewhere += 1
            line.tried += 1
        if self._probe is not None:
            self._probe.before_backward(loss, plain)

    @property
    def notes(self) -> list[str]:
        """What has no loss, or is in no step's; empty if everything has, or nothing."""
        return self.losses.notes(self.backwards) + left_out(self._summands, self._sparse)

    @heard
    def backward_ended(self, loss: Any) -> None:
        """The gradients of one microbatch are there; the weights have not moved, unless in backward."""
        if self.losses.estimate(loss):
            return
        self.losses.forget()
        if self._of_others:
            return
        self.hearing.waits = False
        line = self._steps.ledger.line
        if line is not None:
            line.learned = line.tokens
        if self.stepped_in_backward:
            self._made()
            return
        if self._probe is None or line is None or not self._probe.armed(line.step):
            return
        began = time.perf_counter()
        self._steps.memory.sample()
        self._probe.after_backward(loss)
        self._steps.memory.forget()
        self._steps.ledger.interrupted(time.perf_counter() - began)

    @heard
    def backward_failed(self) -> None:
        """It raised: a program that goes on, with a smaller batch perhaps, has not had this loss."""
        self.losses.forget()
        if self._of_others:
            return
        self.hearing.waits = False
        if (line := self._steps.rest.line) is not None:
            line.loss = None
        if not self.closures.again:
            self._steps.ledger.take_back()
            if (line := self._steps.ledger.line) is not None:
                failed(line)

    @contextmanager
    def nothing_new(self) -> Iterator[None]:
        """Meanwhile what is multiplied was seen before: it is none of the step's tensors."""
        before, self._steps.paused = self._steps.paused, True
        try:
            yield
        finally:
            self._steps.paused = before

    @heard
    def gradients_divided(self, by: float) -> None:
        """The gradients of the open step were divided, so its losses are."""
        if self._steps.rest.keeps:
            self._steps.rest.give_up("a pipeline divides the gradients of its microbatches")
        self._steps.ledger.divide(by)

    @heard
    def pipelined(self) -> None:
        """An engine goes through stages of a pipeline, each of which has a part of what is to be known of a step."""
        self._steps.rest.give_up(PIPELINE)
        self._steps.resting.wake()

    @passed_over
    def gradients_zeroed(self, owner: Optimizer | nn.Module) -> None:
        """The program set gradients to zero: it throws them away if no step was made of any, and none is left."""
        if self._steps.resting.tries:
            return
        self._steps.usual.interrupted(amid=True)
        if not self._steps.made:  # as it mostly is
            self._zeroed(owner)
        elif self.engines.by:  # of what has stepped
            return
        elif (line := self._steps.rest.line) is not None and line.backwards and not self._steps.rest.parted:
            if self._steps.resting.careful:
                self._zeroed(owner)
            else:  # perhaps, and of which of them nobody asks; but where one of several has stepped by them
                line.loss, self._steps.more_thrown_away, self._steps.resting.zeroes = None, True, True

    @heard
    def _zeroed(self, owner: Optimizer | nn.Module) -> None:
        line = self._steps.rest.line or self._steps.ledger.line
        if line is None or not counted(line):
            return
        self._steps.resting.zeroes = True
        if self.closures.depth or inside_backward():
            return
        line.zeroes = True
        if self.none_left(owner):
            self._clips, line.zeroed = Clips(), True

    @passed_over
    def none_left(self, owner: Optimizer | nn.Module) -> bool:
        """Whether no gradients are left but of what was set to zero with this one."""
        left = [p for p in self._trained() if p.grad is not None]
        if not left:
            return True
        zeroed = {id(p) for p in (owner.parameters() if isinstance(owner, nn.Module) else parameters(owner))}
        return all(id(p) in zeroed for p in left)

    @heard
    def gradients_clipped(self, norm: Any, order: float, of: frozenset[int] | None = None) -> None:
        """The program clipped the gradients `of` these parameters; its own norm is the one before clipping."""
        if isinstance(norm, Tensor) and order == 2.0 and not norm.is_meta and not (of and self._others_hold(of)):
            self._clips.add(norm, of)

    @property
    @passed_over
    def settled(self) -> bool:
        """Whether the open step is neither recorded nor one of the first, which are looked at in full."""
        line = self._steps.ledger.line
        return line is not None and not line.recorded and line.step > pace.SETTLED

    def forget_clips(self) -> None:
        """Of what was clipped before the program is left alone nothing is the next whole row's."""
        self._clips = Clips()

    def forget_clips_of_others(self) -> None:
        """An engine of other models stepped: what was clipped by nobody knows whom was theirs."""
        self._clips.keep_known()

    def step_begins(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Callable[[], Any] | None:
        """An optimizer is about to step; what it should call in the place of its closure, if it has one."""
        return self._step_begins(optimizer, closure) or closure

    @heard_if(lambda self, optimizer, closure: self._same_optimizer(optimizer), steps=True)
    def _step_begins(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        if self.prepares or not self.follows(optimizer):
            return None
        if inside_backward():
            self._look(optimizer)
            return None
        if self.stepping is not None and self.stepping() not in (None, optimizer):
            return None
        self.stepping = ref(optimizer)
        if self.closures.again and closure is not None:  # its step before has raised behind the closure's first call
            self.closures.again = False
            self._steps.nothing_learned()
        # Another optimizer takes part in a step that is made, unless its closure makes something to step by.
        if not self._steps.ledger.knows or (self._steps.made and self._steps.ledger.has(optimizer)):
            self._steps.enter(usual=closure is not None)  # without one, neither its forward nor its backward was heard
        if closure is not None:
            if self._steps.rest.on:  # since now
                self.stepping = None
                self.alone.step_begins(optimizer)
            return self.closures.followed(closure, optimizer)
        self._look(optimizer)
        return None

    def _same_optimizer(self, optimizer: Optimizer) -> bool | None:
        return None if self.prepares or not self.follows(optimizer) else self.same.optimizer(optimizer)

    @heard
    def step_ended(self, optimizer: Optimizer, early: bool = False) -> None:
        """An optimizer stepped; if `early`, the new weights are there when the compiled function returns."""
        began = self.stepping is not None and self.stepping() is optimizer
        if self.prepares or not (began or self.follows(optimizer)):
            return
        line = self._steps.ledger.line
        if line is not None:
            line.stepping.discard(id(optimizer))
            if line.movement is not None:
                line.movement.after(optimizer, early=early)
        if inside_backward():
            self.stepped_in_backward = True
            return
        self.ended += 1
        if self.stepping is not None and not began:
            return
        self._steps.ledger.took_part(optimizer)
        if self._steps.rest.asked:
            self._steps.rest.cycle.led_by(optimizer)
        self._made(early=early)

    @heard
    def scaler_skipped(self, optimizer: Optimizer) -> None:
        """A gradient scaler's step returned, and none was made in it: it skipped that, or this part of one."""
        if not self.follows(optimizer) or (self._steps.made and self._steps.ledger.has(optimizer)):
            return
        if self._steps.rest.on:
            if self.engines.alone:
                self.engines.skipped(optimizer)
            else:
                self._steps.left_alone(optimizer, skipped=True)
            return
        line = self._steps.ledger.line
        if line is not None and self.stepping is not None and self.stepping() not in (None, optimizer):
            line.scalars["skipped"] = 1.0  # the step is that of the optimizer around it, and not over
            return
        self.skipped(optimizer)

    def skipped(self, *optimizers: Optimizer) -> None:
        """The open step is one of these, and skipped."""
        if (line := self._steps.ledger.line) is not None:
            for optimizer in optimizers:
                learning_rates(line, optimizer)
                self._steps.ledger.took_part(optimizer)
                if self._steps.rest.asked:
                    self._steps.rest.cycle.led_by(optimizer)
            line.scalars["skipped"] = 1.0
            self._made()

    def replayed(self) -> None:
        """A whole step was replayed."""
        if self._steps.ledger.line is not None:
            self._steps.ledger.line.clips.join(self._clips)
        self._made()

    @property
    def in_closure(self) -> bool:
        """Whether an optimizer evaluates its closure."""
        return self.closures.depth > 0

    def hand_over(self) -> None:
        """Another thread is followed from now on."""
        self.stepping, self.closures.again, self.stepped_in_backward = None, False, False
        self._clips = Clips()
        self.losses.forget()
        self.engines.forget()

    def _made(self, *, early: bool = False) -> None:
        self.stepping, self.closures.again, self.stepped_in_backward = None, False, False
        self._clips = Clips()
        self._steps.end(early=early)

    def _look(self, optimizer: Optimizer) -> None:
        if (line := self._steps.ledger.line) is not None:
            if id(optimizer) in line.stepping:
                line.look_again(id(optimizer))
            line.stepping.add(id(optimizer))
            measures = line.recorded or self._steps.rest.measures(line.step)
            look(line, optimizer, self._clips, self._in_parts, self._trained, measures=measures)
            self._summands = max(self._summands, line.summands)
            self._sparse = max(self._sparse, line.sparse)

    @heard
    def _evaluated(self, optimizer: Optimizer) -> None:
        self._look(optimizer)
        self.alone.evaluated(optimizer)
