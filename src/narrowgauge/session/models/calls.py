"""Calls of the program's models, and what happens around each of them. What models are is said in meeting.py.

    call with gradients       opens a step; its inputs are hashed and counted; the baseline's autocast is entered
    call without gradients    an evaluation: its time is not the step's, unless that learns of it (aside.py)
    without, before backward  on a batch that was called with: a reference (the model without its adapters, say),
                              that the step's loss is made of. Its time is the step's
    of a frozen model         with gradients, given what wants none: a teacher, that was trained before. Its tokens and
                              rows are none of the step's, its time is
    in a generator            that a model's call returned: a part of that call
    in a checkpoint           of the reentrant kind, which a program puts around a model or its parts: a call with
                              gradients, though they are only there when it is run again
    while left alone          is told of by alone.py

Of calls in each other the outermost counts (running.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import GeneratorType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.hearing import Hearing, heard_if
from narrowgauge.session.models.alone import CallsAlone, OfThread
from narrowgauge.session.models.root import Root
from narrowgauge.session.models.roots import Roots
from narrowgauge.session.models.running import Running
from narrowgauge.session.same_weights import SameWeightsProbe
from narrowgauge.session.steps.line import Line
from narrowgauge.session.steps.loading import Loading
from narrowgauge.session.steps.same_training import SameTraining
from narrowgauge.session.steps.steps import Steps, StopTraining
from narrowgauge.session.steps.trained import Trained
from narrowgauge.session.steps.zeroed import failed
from narrowgauge.session.tensors.batches import Known, known_by, moves
from narrowgauge.session.tensors.of_modules import ids_of


class _OfThread(OfThread):
    """What each thread is about, followed or not."""

    aside = 0  # calls of models that run and are not followed


class Calls:
    """Follows the calls of one program's models.

    Args:
        roots, steps, probe, hearing, same, loading: the session's.
        optimizers: those that the program made and still holds.
        taken: told whenever another model was taken, and what the program has added to one.
        deaf: called with True where calls of modules need not be heard, because a model is called that they are parts
            of, and with False where they do again.
    """

    def __init__(
        self,
        roots: Roots,
        steps: Steps,
        probe: SameWeightsProbe | None,
        hearing: Hearing,
        same: SameTraining,
        loading: Loading,
        optimizers: Trained,
        taken: Callable[[str], None],
        deaf: Callable[[bool], None] = lambda deaf: None,
    ) -> None:
        self._roots, self._steps, self._probe = roots, steps, probe
        self.hearing, self._same, self._optimizers = hearing, same, optimizers
        self._loading, self._taken = loading, taken
        self._thread, self._running = _OfThread(), Running(deaf)
        self.alone = CallsAlone(self._running, hearing, steps, loading, self._thread, self.recover)
        self.tokens = 0  # of the last call with gradients
        self._line: Line | None = None  # that they were counted in
        self._generators: WeakSet[GeneratorType[Any, Any, Any]] = WeakSet()  # that models' calls returned
        self._generates = self._in_generator = False
        self._eval_began = self._waited = 0.0
        self._again: Known = {}
        self._evaluates: int | None = None  # the model, in evaluation mode

    @property
    def running(self) -> bool:
        """Whether a model is being called."""
        return self._running.depth > 0

    @property
    def training(self) -> bool:
        """Whether that is a forward with gradients."""
        return self._running.training

    @passed_over
    def checkpoint_runs(self, runs: bool) -> None:
        """A reentrant checkpoint begins what it will run again with gradients, or has ended it."""
        self._thread.checkpoint = runs

    def learns(self) -> bool:
        """Whether what is called now is called with gradients, or will be when a checkpoint runs it again."""
        return torch.is_grad_enabled() or self._thread.checkpoint

    def _trained_before(self, root: Root) -> bool:
        """Whether a model is trained no more, and another is: a teacher, say."""
        return len(self._roots) > 1 and bool(self._optimizers) and not self._optimizers.holds(ids_of(root.module))

    def of_training(self) -> bool:
        """Whether what the calling thread multiplies is of the training: its own, or a part of its running forward.

        A forward may have threads of its own, in which parts of a model run. One that calls the whole serves others.
        What a frozen model multiplies is of no step, though its layers, if they are converted, would tell of it.
        """
        if self.hearing.perhaps_mine():
            return not self._running.teaches
        if inside_backward():
            return not self.hearing.refused
        return self._running.training and not self._thread.aside and self.learns()

    @heard_if(
        lambda self, root, args, kwargs: self._same.model(root) if self.learns() else None,
        aside=lambda self, root, args, kwargs: self._begins_aside(),
    )
    def begins(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        if inside_backward():
            return
        running = self._running
        if running.depth:
            self.recover()
        if not running.depth and _estimates(args, kwargs):
            return
        running.depth += 1
        if running.depth > 1:
            return
        running.of(root)
        root.heard_in = self.hearing.turn
        if not self.learns():
            if self._refers(root, args, kwargs):
                running.refers = True
                self._steps.evals.reference_begins()
                return
            self._waited = self._loading.evaluated()
            self._again = known_by((args, kwargs))
            self._evaluates = None if root.module.training else id(root)
            self._eval_began = time.perf_counter()
            unsure = root.module.training and self._steps.references.unsure
            trains = not self._trained_before(root)
            self._steps.evals.model_begins(root, evaluates=root.evaluates, unsure=unsure, trains=trains)
            return
        if self._roots.changed:
            self._renew()
        if not root.half_seen and root.frozen() and not moves((args, kwargs)):  # nor is all known of what is half seen
            running.teaches = True
            root.enter_autocast()
            return
        line = self._steps.ledger.line
        try:
            self._steps.enter(usual=True)
        except StopTraining:
            running.refused()
            raise
        if line is not self._steps.ledger.line:
            self._roots.hooked_late(root.module)
        if self.alone.rest.on:
            self.alone.begins(root, args, kwargs)
            return
        running.training = True
        root.enter_autocast()
        self._in_generator = self._generates and any(returned.gi_running for returned in self._generators)
        given = () if self.hearing.stage else (args, kwargs)  # what a later stage is given is no data
        tokens = 0 if self._steps.paused or self._in_generator else self._steps.feed(given, id(root), root.width)
        self.tokens, self._line = tokens, self._steps.ledger.line
        if (line := self._line) is not None:
            line.tokens += tokens
            self._loading.trained(line)
        if self._probe is not None:
            self._probe.module_call_begin(root.module, args, kwargs, root.model)

    def _refers(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what trains is looked at once more before its backward: by the model without its adapters, say."""
        references = self._steps.references
        if not (root.module.training and references.may_be((args, kwargs))):
            return False
        references.came()
        return True

    def _begins_aside(self) -> None:
        if not inside_backward():
            self._thread.aside += 1

    def _ended_aside(self, root: Root) -> None:
        if inside_backward():
            return
        if self._thread.aside:
            self._thread.aside -= 1
        else:  # it was followed when it began, and the thread lost its turn
            root.exit_autocast()

    @heard_if(aside=lambda self, root, *_: self._ended_aside(root))
    def ended(self, root: Root, output: Any, missed: dict[str, Any] | None = None, left: bool = False) -> None:
        """A model's call returned (or raised: then `output` is None); it had `missed` as keyword arguments as well.

        One of something compiled is no call of a module: it is told to have been `left` by an error.
        """
        running = self._running
        if inside_backward() or running.depth == 0:
            return
        running.depth -= 1
        if running.depth:
            return
        if (output is None and running.raised()) or (left and self._unlearned()):
            self._take_back()
            missed = None
        teaches, refers = running.teaches, running.refers
        running.over()
        if teaches:
            root.exit_autocast()
            return
        if refers:
            self._steps.evals.reference_ended(output)
            return
        if missed and self.learns() and not (self._steps.paused or self._in_generator or self.hearing.stage):
            late = self._steps.batches.see(missed, more=True, model=id(root))
            if self._steps.ledger.line is not None:
                self._steps.ledger.line.tokens += late
        if not self._steps.paused:
            self._steps.batches.made(output)
        if isinstance(output, GeneratorType):
            self._generators.add(output)
            self._generates = True
        if not self.learns():
            if missed and self._refers(root, (), missed):
                self._steps.evals.take_back()
                self._steps.evals.reference_ended(output)
                return
            self._steps.evals.model_ended(output)
            seconds = time.perf_counter() - self._eval_began
            self._steps.ledger.aside.called(seconds, self._waited, self._again, self._evaluates)
            return
        self._steps.evals.training_ended(root, output)
        root.exit_autocast()
        if self._probe is not None:
            self._probe.module_call_end(root.module, output)

    def _take_back(self) -> None:
        """The call raised: a program that goes on, with a smaller batch perhaps, has not trained on its tokens."""
        if self._running.training and self._line is not None and self._line is self._steps.ledger.line:
            self._line.tokens -= self.tokens
            self._steps.batches.take_back()
            failed(self._line)
        self.tokens = 0

    def _unlearned(self) -> bool:
        """Whether no backward pass came of the last call with gradients."""
        return self._line is not None and self._line.learned <= self._line.tokens - self.tokens

    def recover(self) -> None:
        """Forget a call that was left without a word."""
        running = self._running
        if not (running.depth and self.hearing.perhaps_mine() and running.lost()):
            return
        if running.root is not None:
            running.root.exit_autocast()
        running.depth = 0
        if self._unlearned():  # else the program has cleared the hook that tells its end
            self._take_back()
        self._steps.left()
        running.over()

    def hand_over(self) -> None:
        """Another thread is followed from now on: what this one is in, an evaluation say, is not."""
        if self._probe is not None:
            self._probe.hand_over()
        self._running.depth = 0
        self._running.over()

    def take(self, module: nn.Module) -> Root:
        """A module, of which no call is heard so far, is a model."""
        if self._roots.changed:  # it may be a new part of a model that is known
            self._renew()
        self._steps.another_model()
        root = self._roots.take(module, self._optimizers, self.hearing.stage)
        self._taken("")
        return root

    def _renew(self) -> None:
        self._steps.another_model()
        if what := self._roots.renew():
            self._taken(what)


def _estimates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all tensors that a model is given are on the meta device: its shapes are asked, say."""
    found = False
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            if not x.is_meta:
                return False
            found = True
    return found
