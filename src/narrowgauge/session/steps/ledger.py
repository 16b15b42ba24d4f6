"""One line per optimizer step: loss, gradient norm, learning rate, tokens, time, memory, and what went wrong.

    loss               sum of the step's backward losses (each microbatch as the script weighted it, or its pipeline)
    step_seconds       from the end of one optimizer step to the end of the next, without evaluation, probes and
                       watching; the first from the making of the optimizer; device time where the device is a GPU
    tokens_per_second  tokens / step_seconds
    data_seconds       waited for batches of torch's data loaders that the step was trained on
    turn               where not every step is of the same optimizers: of which it is (`turns.py`)
    nonfinite          1 where the loss is not finite, or a gradient that the weights were moved by; one that a gradient
                       scaler finds, and skips the step for, is what it is there to find
    clean              1 where that time is undisturbed: no evaluation, probe or recording fell into it, nor what
                       was left of a recording, if that took longer than the step
    pace               what a recorded step takes beside another

A line is written when the *next* step begins, because an evaluation after the optimizer's step still belongs to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_float

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from narrowgauge.session.steps.aside import Aside
from narrowgauge.session.steps.laps import Laps
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.looking import gradients, learning_rates
from narrowgauge.session.steps.rows import StepRows
from narrowgauge.session.steps.turns import held
from narrowgauge.session.tensors.deferred import kept
from narrowgauge.session.tensors.sharded import here


class Ledger:
    """Writes one line of scalars per step; never waits for the device."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self.clock = Laps()
        self.aside = Aside()
        self.line: Line | None = None
        self.steps = 0
        self._skipped = -1  # so many were made before the last one of which a scaler skipped something
        self._alone: dict[tuple[int, ...], int] = {}  # who made the last step, and their trainers, where it has no line

    def open(self) -> Line:
        """Begin the next step's line, closing the last one."""
        self.close()
        if self._alone:
            self.rows.turn(self._alone.values())
            self._alone = {}
        self.line = Line(self.steps + 1)
        return self.line

    def add_microbatch(self, loss: Tensor | None) -> None:
        """A microbatch, and its loss as `backward` got it (unscaled), if it has one."""
        if self.line is None:
            return
        self.line.before = self.line.loss, self.line.microbatches
        self.line.microbatches += 1
        if loss is not None:
            add_loss(self.line, loss)

    def divide(self, by: float) -> None:
        """The step's gradients so far were divided: so is its loss."""
        if self.line is not None and self.line.loss is not None and by:
            loss = self.line.loss
            self.line.loss = loss / by if isinstance(loss, Tensor) else float32(loss / float32(by))

    def take_back(self) -> None:
        """The last microbatch's backward failed: it was none of the step's, nor was what it was computed from."""
        if self.line is not None:
            self.line.tokens = self.line.learned
            self.line.loss, self.line.microbatches = self.line.before

    def begin_anew(self) -> None:
        """What the open step's microbatches left was thrown away."""
        if self.line is not None:
            self.line.loss, self.line.microbatches, self.line.before = None, 0, (None, 0)
            self.line.tokens = self.line.learned = self.line.vectors = 0

    def keep_the_latest(self) -> None:
        """The same of all that has had its backward; what models were called with since stays."""
        if self.line is not None:
            tokens = self.line.tokens - self.line.learned
            self.begin_anew()
            self.line.tokens = tokens

    def ready(self) -> None:
        """All is ready for the first step, whose time begins."""
        if not self.steps and self.line is None:
            self.clock = Laps()
            self.aside.taken()

    def hand_over(self) -> None:
        """Another thread is followed from now on; it may have another device."""
        self.clock.hand_over()

    @property
    def unfinished(self) -> bool:
        """Whether the open step's optimizer has not stepped."""
        return self.line is not None and self.line.step > self.steps

    def stepped(self) -> None:
        """The optimizer stepped (or the gradient scaler chose not to)."""
        if self.line is not None:
            # A program with two optimizers steps twice; both laps belong to the one step.
            so_far = self.line.scalars.get("step_seconds", 0.0)
            self.clock.away += self.aside.taken()
            away, ending = self.clock.away, self.clock.ending
            seconds = self.clock.lap()
            self.line.disturbed |= away > 0.0 or ending > seconds
            self.line.scalars["step_seconds"] = so_far + seconds
            self.steps = self.line.step

    def skips(self, line: Line | None, optimizer: Optimizer) -> None:
        """A gradient scaler skips this one in the step that is made, which is left alone; or all of it."""
        if line is not None:
            learning_rates(line, optimizer)
            line.scalars["skipped"] = 1.0
        elif self._skipped != self.steps:  # none of several before it
            self._skipped = self.steps
            self.rows.skipped_steps += 1

    def left_alone(self, line: Line | None, optimizer: Optimizer) -> None:
        """A step was made by this of which nobody was told more than is in the line, if that is kept."""
        self.steps += 1
        away = self.aside.taken()
        if line is None:
            self.rows.pace.passed()
            return
        self.clock.away += away
        self.keep(line, optimizer, disturbed=away > 0.0)

    def keep(self, line: Line, optimizer: Optimizer, *, disturbed: bool = False) -> None:
        """The line of a step that was left alone is finished."""
        clock = self.clock
        if "lr" not in line.scalars:  # nobody was told that it began
            rates(line, optimizer)
        ending = clock.ending  # of a recording, if this is the step behind it
        seconds = line.scalars["step_seconds"] = clock.lap()
        line.disturbed = disturbed or ending > seconds
        line.events, clock.pair = clock.pair, None
        self.rows.hold(line)

    def heard_again(self, *optimizers: Optimizer) -> None:
        """These made the last step, that was left alone. What comes next is timed, what was so far is not."""
        self._alone = {held(optimizer): self.rows.turns.trainer(optimizer) for optimizer in optimizers}
        self.clock.lap()
        self.clock.events()

    def has(self, optimizer: Optimizer) -> bool:
        """Whether the open step is of this optimizer, with what it holds now."""
        return held(optimizer) in (self._alone if self.line is None else self.line.stepped)

    @property
    def knows(self) -> bool:
        """Whether it can tell who takes part in a step."""
        return self.line is not None or bool(self._alone)

    def took_part(self, optimizer: Optimizer) -> None:
        """The open step is of this optimizer, too: it stepped, or was skipped."""
        if self.line is not None:
            self.line.optimizers.add(id(optimizer))
            self.line.stepped.add(held(optimizer))
            self.line.trainers.add(self.rows.turns.trainer(optimizer))
        elif self._alone:
            self._alone[held(optimizer)] = self.rows.turns.trainer(optimizer)

    def interrupted(self, seconds: float) -> None:
        """The program, or a probe, did something else: it falls into the time of the step that ends next."""
        self.clock.away += seconds

    @contextmanager
    def recording_ends(self) -> Iterator[None]:
        """Meanwhile what the finished step recorded is put in order: as the next one begins, at its own cost."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.clock.ending += seconds
        if self.line is not None and not self.unfinished:
            self.line.scalars["step_seconds"] = self.line.scalars.get("step_seconds", 0.0) + seconds

    def close(self) -> None:
        """Hand the finished line over, to be written."""
        line, self.line = self.line, None
        if line is None or line.step > self.steps:
            return  # an unfinished step has no update to be paired with
        line.scalars.update(gradients(line))  # once: a step may be of thousands of optimizers
        line.events, line.movement = self.clock.events(), None
        self.rows.add(line)

    def finish(self) -> None:
        """Write everything that is still on its way."""
        self.close()
        self.rows.finish()


def rates(line: Line, *optimizers: Optimizer) -> None:
    """Those that optimizers step with, of a step that is left alone."""
    rate: float | None = None
    for group in optimizers[0].param_groups if len(optimizers) == 1 else ():
        found = group.get("lr")
        if type(found) is not float or (rate is not None and found != rate):
            break
        rate = found
    else:
        if rate is not None and not line.rates:  # one of all groups, as mostly
            line.scalars["lr"] = rate
            return
    line.rates.clear()
    for name in [name for name in line.scalars if name.startswith("lr")]:  # it began before, and raised
        del line.scalars[name]
    for optimizer in optimizers:
        learning_rates(line, optimizer)


def add_loss(line: Line, loss: Tensor) -> None:
    """A loss of a step, which has one more from now on; in float32, as it is now."""
    more = kept(here(loss))
    if isinstance(more, Tensor) and (more.dim() or more.dtype != torch.float32):
        more = float32(more.item()) if type(more) is Tensor and more.is_cpu else more.reshape(()).float()
    line.loss = more if line.loss is None else together(line.loss, more)


def together(loss: Tensor | float, more: Tensor | float) -> Tensor | float:
    """The sum of two losses, in float32 wherever they are."""
    if isinstance(loss, Tensor):
        return loss + (more.to(loss.device) if isinstance(more, Tensor) else more)
    return loss + more if isinstance(more, Tensor) else float32(loss + more)


def float32(number: float) -> float:
    """The nearest number in float32."""
    return c_float(number).value
