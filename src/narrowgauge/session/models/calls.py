"""Calls of the program's models: which modules are models, and what happens around each call.

    outermost call, with gradients, of what owns parameters in an optimizer      a model: taken as a root
    call with gradients       opens a step; its inputs are hashed and counted; the baseline's autocast is entered
    call without gradients    an evaluation: its time is not the step's
    in a generator            that a model's call returned: a part of that call
    in a checkpoint           of the reentrant kind, which a program puts around a model or its parts: a call with
                              gradients, though they are only there when it is run again

A compiled function is called as a whole: inside of it nobody is told of calls.

A call that a KeyboardInterrupt has left ends without a word: torch tells hooks of an Exception alone. A notebook goes
on after it, so whether the outermost call still runs is looked up where that matters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FrameType, GeneratorType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.session.doors.hearing import Hearing, capturing, heard, heard_if, unreal
from narrowgauge.session.models.first_call import reroute
from narrowgauge.session.models.frames import innermost_call, left_by_an_error, still_runs
from narrowgauge.session.models.root import Root
from narrowgauge.session.models.roots import Roots
from narrowgauge.session.same_weights import SameWeightsProbe
from narrowgauge.session.steps.same_training import SameTraining
from narrowgauge.session.steps.steps import Steps, StopTraining
from narrowgauge.session.steps.trained import Trained


class _OfThread(threading.local):
    """What each thread is about, followed or not."""

    waited = 0.0  # seconds for batches that no model was called with yet
    checkpoint = False  # a reentrant checkpoint's first forward is running
    aside = 0  # calls of models that run and are not followed


class Calls:
    """Follows the calls of one program's models.

    Args:
        roots, steps, probe, hearing, same: the session's.
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
        optimizers: Trained,
        taken: Callable[[str], None],
        deaf: Callable[[bool], None] = lambda deaf: None,
    ) -> None:
        self._roots, self._steps, self._probe = roots, steps, probe
        self.hearing, self._same, self._optimizers = hearing, same, optimizers
        self._taken, self._deaf = taken, deaf
        self._thread = _OfThread()
        self._depth = 0
        self._outermost: FrameType | None = None  # torch's, of the call that is running
        self._running: Root | None = None
        self._rerouted: Callable[[], None] = _nothing
        self._compiled: dict[int, Root] = {}  # by the id of what was compiled
        self._tokens = 0  # of the last call with gradients
        self._generators: WeakSet[GeneratorType[Any, Any, Any]] = WeakSet()  # that models' calls returned
        self._in_generator = False
        self._eval_began = 0.0
        self.loaders_seen = False
        self.training = False  # a forward with gradients is running
        self.scripted = False  # a model that is trained is TorchScript

    def module_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called; the outermost one with trained parameters is taken as a model."""
        if self._depth or module in self._roots or not self._optimizers or inside_backward():
            return
        if not self.learns():
            if not self._steps.evals.knows(module):
                self._evaluated(module)
            return
        if not self._owned(module):
            return
        if isinstance(module, torch.jit.ScriptModule):
            self.scripted = True
            return
        self._followed(module, args)

    def _owned(self, module: nn.Module) -> bool:
        if capturing() or unreal():  # a copy is told by its values
            return False
        try:
            return unseen_by_modes(self._optimizers.owns, module)
        except Exception as error:
            self.hearing.failed("module_called", error)
            return False

    @heard
    def _evaluated(self, module: nn.Module) -> None:
        self._steps.evals.module_called(module, self._optimizers.ids)

    @heard_if(lambda self, module, args: self._same.module(module))
    def _followed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        kind = type(module)
        root = self._take(module)
        root.follow(self.begins, self.ended)
        root.half_seen = True  # its own hook is there from the next call on; torch's global one has no keywords
        self.begins(root, args, {})
        if type(module) is not kind:
            self._rerouted = reroute(module)

    def checkpoint_runs(self, runs: bool) -> None:
        """A reentrant checkpoint begins what it will run again with gradients, or has ended it."""
        self._thread.checkpoint = runs

    def learns(self) -> bool:
        """Whether what is called now is called with gradients, or will be when a checkpoint runs it again."""
        return torch.is_grad_enabled() or self._thread.checkpoint

    def batch_loaded(self, seconds: float, *, last: bool = False) -> None:
        """A data loader's iterator gave a batch after so long, or had no more: the one before was the `last`."""
        self._thread.waited += seconds
        if self.hearing.perhaps_mine():
            self.loaders_seen = True
            if last:
                self._steps.evals.data_ended()

    def of_training(self) -> bool:
        """Whether what the calling thread multiplies is of the training: its own, or a part of its running forward.

        A forward may have threads of its own, in which parts of a model run. One that calls the whole serves others.
        """
        if self.hearing.perhaps_mine():
            return True
        if inside_backward():
            return not self.hearing.refused
        return self.training and not self._thread.aside and self.learns()

    @heard_if(
        lambda self, root, args, kwargs: self._same.model(root) if self.learns() else None,
        aside=lambda self, root, args, kwargs: self._begins_aside(),
    )
    def begins(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        if inside_backward():
            return
        self.recover()
        self._depth += 1
        if self._depth > 1:
            return
        self._outermost, self._running = innermost_call(), root
        root.heard_in = self.hearing.turn
        self._deaf(True)
        if not self.learns():
            self._thread.waited = 0.0  # an evaluation's batch
            self._eval_began = time.perf_counter()
            self._steps.evals.model_begins()
            return
        if self._roots.changed:
            self._renew()
        try:
            self._steps.enter()
        except StopTraining:
            self._depth = 0
            self._deaf(False)
            raise
        self.training = True
        root.enter_autocast()
        self._in_generator = any(returned.gi_running for returned in self._generators)
        given = () if self.hearing.stage else (args, kwargs)  # what a later stage is given is no data
        tokens = 0 if self._steps.paused or self._in_generator else self._steps.feed(given)
        self._tokens, line = tokens, self._steps.line
        if line is not None:
            line.tokens += tokens
            self.loaders_seen |= self._thread.waited > 0.0
            if self.loaders_seen:
                line.scalars["data_seconds"] = line.scalars.get("data_seconds", 0.0) + self._thread.waited
                self._thread.waited = 0.0
        if self._probe is not None:
            self._probe.module_call_begin(root.module, args, kwargs, root.model)

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
    def ended(self, root: Root, output: Any, missed: dict[str, Any] | None = None) -> None:
        """A model's call returned (or raised: then `output` is None); it had `missed` as keyword arguments as well."""
        if inside_backward() or self._depth == 0:
            return
        self._depth -= 1
        if self._depth:
            return
        raised = output is None and self._outermost is not None and left_by_an_error(self._outermost)
        self._left()
        if raised:
            self._take_back()
        elif missed and self.learns() and not (self._steps.paused or self._in_generator or self.hearing.stage):
            late = self._steps.batches.see(missed, more=True)
            if self._steps.line is not None:
                self._steps.line.tokens += late
        if not self._steps.paused:
            self._steps.batches.made(output)
        if isinstance(output, GeneratorType):
            self._generators.add(output)
        if not self.learns():
            self._steps.evals.model_ended(output)
            self._steps.ledger.interrupted(time.perf_counter() - self._eval_began)
            return
        root.exit_autocast()
        if self._probe is not None:
            self._probe.module_call_end(root.module, output)

    def _take_back(self) -> None:
        """The call raised: a program that goes on, with a smaller batch perhaps, has not trained on its tokens."""
        if self._steps.line is not None and self.learns():
            self._steps.line.tokens -= self._tokens
        self._tokens = 0

    def recover(self) -> None:
        """Forget a call that was left without a word."""
        if not self._depth or self._outermost is None or not self.hearing.perhaps_mine() or still_runs(self._outermost):
            return
        if self._running is not None:
            self._running.exit_autocast()
        self._depth = 0
        self._left()

    def hand_over(self) -> None:
        """Another thread is followed from now on: what this one is in, an evaluation say, is not."""
        if self._probe is not None:
            self._probe.hand_over()
        self._depth = 0
        self._left()

    def _left(self) -> None:
        self._outermost = self._running = None
        self._deaf(False)
        self.training = False
        self._rerouted()

    @heard_if(lambda self, owner, args, kwargs: self._same_compiled(owner))
    def compiled_begins(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Root | None:
        """A compiled function, or a module compiled in place, is called: as a model, unless one is being called.

        A function that is called before any model was is taken for the call of the whole that the optimizers train.
        """
        if self._depth or not self._optimizers or inside_backward():
            return None
        root = self._compiled.get(id(owner))
        if root is None or not root.alive:  # or an address that is used again
            root = self._take_compiled(owner)
            if root is None:
                return None
            self._compiled[id(owner)] = root
        self.begins(root, args, kwargs)
        return root

    def _same_compiled(self, owner: Any) -> bool | None:
        if not self.learns() or not self._optimizers:
            return None
        root = self._compiled.get(id(owner))
        if root is not None and root.alive:
            return self._same.model(root)
        module = self._compiled_model(owner)
        return None if module is None else self._same.module(module)

    @heard
    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's compiled step is called, and no forward or backward in it: what it ends is seen as a whole."""
        if optimizer in self._optimizers and not inside_backward():
            self._steps.looked()

    def compiled_ended(self, known: Root | None, output: Any) -> None:
        """Its call returned."""
        self._settle()
        if known is not None:
            self.ended(known, output)

    @heard
    def _settle(self) -> None:
        self._steps.settle()

    def _take_compiled(self, owner: Any) -> Root | None:
        module = self._compiled_model(owner)
        return None if module is None or module in self._roots else self._take(module)

    def _compiled_model(self, owner: Any) -> nn.Module | None:
        if not torch.is_grad_enabled():
            return None
        if isinstance(owner, nn.Module):
            return owner if self._optimizers.owns(owner) else None
        return self._roots.whole(self._optimizers) if not len(self._roots) else None

    def _take(self, module: nn.Module) -> Root:
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


def _nothing() -> None:
    """Undo nothing."""
