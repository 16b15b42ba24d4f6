"""Calls of models while the program is left alone (`steps/rest.py`): as little of each as can be."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn

from narrowgauge.compute.nn.scaling.clock import NO_TASK, backward_task
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.optimizer_steps import OURS
from narrowgauge.session.doors.hearing import Hearing, heard
from narrowgauge.session.models.frames import CALLING
from narrowgauge.session.models.root import Root
from narrowgauge.session.models.running import Running
from narrowgauge.session.steps.loading import Loading
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.tensors.batches import moves

_hooks, _NoFunctionModes = nn.modules.module._global_forward_pre_hooks, torch._C.DisableTorchFunction


@passed_over
def _none() -> None:
    """No model."""


class OfThread(threading.local):
    """What each thread is about."""

    checkpoint = False  # a reentrant checkpoint's first forward is running, which runs again with gradients


class CallsAlone:
    """Such calls with gradients; an evaluation is followed as ever.

    Args:
        running: the call that runs.
        hearing, steps, loading: the session's.
        thread: what the calling thread is about.
        recover: forgets a call that was left without a word.
    """

    def __init__(
        self,
        running: Running,
        hearing: Hearing,
        steps: Steps,
        loading: Loading,
        thread: OfThread,
        recover: Callable[[], None],
    ) -> None:
        self.rest = steps.rest
        self.running, self.hearing, self._steps, self.loading = running, hearing, steps, loading
        self.thread, self._recover = thread, recover
        self.hook: Callable[[nn.Module, tuple[Any, ...]], None] | None = None  # hears of all modules, if anybody does
        self.expected: Callable[[], nn.Module | None] = _none  # what was called last, if its own hooks tell of it

    @partial(passed_over, below=True)
    def passes(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A model is called while the program is left alone; whether it is left alone with that."""
        running, steps = self.running, self._steps
        if self.hearing.ident != get_ident():
            return False
        if backward_task() != NO_TASK:
            return True
        if running.depth:
            self._recover()
        if not running.depth:
            learns = torch.is_grad_enabled() or self.thread.checkpoint
            if not (learns or self._refers(root, args, kwargs)):
                return False
            if learns and self.rest.parted:
                self._parted()
                return False
            frame: FrameType | None = sys._getframe(1)  # as `Running.of`, in one function
            while frame is not None and frame.f_code is not CALLING:
                frame = frame.f_back
            running.call, running.root, running.alone = frame, root, True
            # torch takes a longer way to each module while there is one
            if steps.resting.quiet and _hooks.get(OURS) is self.hook:
                _hooks.pop(OURS, None)
            resting, asks = steps.resting, steps.references.asks
            usual = (root is steps.usual.model and not resting.careful) or (resting.tries and not asks)
            if not learns:
                running.refers = True
            elif usual and steps.evals.idle and self.hearing.plainly():
                self.rest.called = steps.evals.fed = True
                self.loading.of_thread.waited = 0.0
            else:
                self._called(root, args, kwargs)
        elif not running.alone:  # in an evaluation
            return False
        running.depth += 1
        return True

    def loud(self) -> None:
        """Something is compiled: what hooks there are is asked whenever it is called."""
        if self._steps.resting.quiet:
            self._steps.resting.quiet = False
            self._steps.usual.over()
            if self.hook is not None:
                _hooks[OURS] = self.hook

    def begins(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost call, as which it was followed so far, is one that is left alone."""
        self.running.alone = True
        self._called(root, args, kwargs)

    @passed_over
    def _refers(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a model is called without gradients as a reference, as others were, and `made` will be told."""
        steps = self._steps
        references, told = steps.references, self.rest.hands_on and steps.resting.quiet and not self.rest.parted
        if not (told and references.seen and references.asks and root.module.training and self.hearing.plainly()):
            return False
        try:  # as `heard`, in no function more
            with _NoFunctionModes():
                refers = references.may_be((args, kwargs))
        except Exception:  # which is told of by the long way
            return False
        if refers:
            steps.evals.reference_begins()
        return refers

    @heard
    def _parted(self) -> None:
        self._steps.resting.parted()

    @heard
    def _called(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if root.frozen() and not moves((args, kwargs)):
            return
        self._steps.resting.called()
        self.loading.evaluated()
        self._steps.evals.training_begins()
        if self._steps.resting.careful:
            self._steps.fed_alone(() if self.hearing.stage else (args, kwargs), id(root))
        self._steps.usual.begun(root)
        if root.followed:
            self.expected = root.reference

    @partial(passed_over, below=True)
    def passed(self) -> bool:
        """Such a call returned, or raised."""
        running = self.running
        if not (running.alone and running.depth) or self.hearing.ident != get_ident() or backward_task() != NO_TASK:
            return False
        running.depth -= 1
        if not running.depth:
            if running.rerouted is not None or running.inside is not None:
                running.over()
            else:  # as that does, in one function
                running.call, running.root, running.alone = None, None, False
                if self.hook is not None:
                    _hooks[OURS] = self.hook
        return True

    @passed_over
    def made(self, inputs: Any, output: Any) -> None:
        """This was returned by a call with these, and the next row may be of a step that gives it to another model."""
        running = self.running
        if running.depth:
            return
        if running.refers:
            running.refers = False
            try:
                with _NoFunctionModes():
                    self._steps.evals.reference_ended(output)
            except Exception as error:
                self.hearing.kept("ended", error)  # as the long way names it
        else:
            self._made(inputs, output)

    @heard
    def _made(self, inputs: Any, output: Any) -> None:
        self._steps.batches.made(output, inputs)
