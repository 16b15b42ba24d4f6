"""Modules that a program calls: which of them are models, and which tell of a model's call in its place.

owns parameters in an optimizer     a model, taken with its first call with gradients; its own hooks tell of others
is a part of one, or computes it    known: the call around it counts
what a model wraps, called itself   a call of that model, whose hooks hear of what is around it alone
without gradients, no model         an evaluation's, perhaps (losses.py)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.session.doors.hearing import Hearing, capturing, heard, heard_if, unreal
from narrowgauge.session.models.alone import CallsAlone
from narrowgauge.session.models.calls import Calls
from narrowgauge.session.models.first_call import reroute
from narrowgauge.session.models.root import Root
from narrowgauge.session.models.roots import Roots
from narrowgauge.session.steps.same_training import SameTraining
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.trained import Trained


class Meeting:
    """Of one program.

    Args:
        calls: is told of models' calls.
        roots, steps, hearing, same: the session's.
        optimizers: those that the program made and still holds.
    """

    def __init__(
        self,
        calls: Calls,
        roots: Roots,
        steps: Steps,
        hearing: Hearing,
        same: SameTraining,
        optimizers: Trained,
    ) -> None:
        self._calls, self._roots, self._steps = calls, roots, steps
        self.hearing, self._same, self._optimizers = hearing, same, optimizers
        self._running = calls.alone.running
        self.scripted = False  # a model that is trained is TorchScript

    @property
    def alone(self) -> CallsAlone:
        """Who hears of models while steps are left alone."""
        return self._calls.alone

    @partial(passed_over, below=True)
    def module_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called; the outermost one with trained parameters is taken as a model."""
        if self._running.depth or inside_backward():
            return
        if not self._calls.learns():  # also where the optimizer went with the function that trained
            if (root := self._roots.around_call(module)) is not None:
                self._called_itself(root, module, args)
            elif module not in self._roots and not self._steps.evals.knows(module):
                self._evaluated(module, args)
            return
        if not self._optimizers:
            return
        if module in self._roots:
            if (root := self._roots.unfollowed(module)) is not None:
                self._called_itself(root, module, args)
            return
        if not self._owned(module):
            return
        if isinstance(module, torch.jit.ScriptModule):
            self.scripted = True
            return
        self._followed(module, args)

    @partial(passed_over, below=True)
    def known(self, module: nn.Module) -> bool:
        """Whether its own hooks tell of it, or it has nothing that is trained: another's model, or a loss."""
        if module in self._roots:
            return self._roots.unfollowed(module) is None
        if not (module._parameters or module._modules):  # unless the program has a word of its own
            return type(module).parameters is nn.Module.parameters
        if self._running.depth:
            return True
        try:
            return self._optimizers.passes_by(module)
        except Exception:  # which is told of where it is asked carefully
            return False

    def _owned(self, module: nn.Module) -> bool:
        if capturing() or unreal():  # a copy is told by its values
            return False
        try:
            return unseen_by_modes(self._optimizers.owns, module) and not self._roots.family.computes(module)
        except Exception as error:
            self.hearing.failed("module_called", error)
            return False

    @heard
    def _evaluated(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._steps.evals.module_called(module, self._optimizers.ids, (args, {}))

    @heard_if(lambda self, root, model, args: self._same.model(root) if self._calls.learns() else None)
    def _called_itself(self, root: Root, model: nn.Module, args: tuple[Any, ...]) -> None:
        """A model is called itself, of which the program calls what wraps it, or what is compiled of it.

        Its hook is there for this call alone: no graph is made anew for its sake.
        """
        calls, alone, running, learns = self._calls, self._calls.alone, self._running, self._calls.learns()

        def after(_module: nn.Module, given: Any, kwargs: dict[str, Any], output: Any) -> None:
            hook.remove()
            whole = root.half_seen or not (given or calls.learns())  # without gradients by these alone is it told
            missed, root.half_seen = kwargs if whole else {}, False
            if running.inside is hook and not (alone.rest.on and alone.passed()):
                calls.ended(root, output, missed)

        if not (alone.rest.on and learns and alone.passes(root, args, {})):
            root.half_seen = learns and not root.frozen()  # or it may teach
            calls.begins(root, args, {})
        if running.root is root:
            hook = running.inside = model.register_forward_hook(after, with_kwargs=True, always_call=True)
        else:
            root.half_seen = False

    @heard_if(lambda self, module, args: self._same.module(module))
    def _followed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        kind = type(module)
        root = self._calls.take(module)
        root.follow(self._calls)
        root.half_seen = True  # its own hook is there from the next call on; torch's global one has no keywords
        line = self._steps.line
        self._calls.begins(root, args, {})
        if line is self._steps.line:  # or that has said so itself
            self._roots.hooked_late(module)
        if type(module) is not kind:
            self._running.rerouted = reroute(module)
