"""Calls of compiled functions as those of models: inside of one nobody is told of calls, so it is called as a whole.

a module that was compiled       is a model, if it owns what is trained
a function that is given some    is those models' call, if it is given anything to call them with
a function that names models     is those models' call: its code does, and a method's its object's; known ones, and
                                 others that are trained
any other, before any model      is the call of the whole that the optimizers train
any other, or inside of a call   is none
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.session.doors.hearing import Hearing, heard, heard_if
from narrowgauge.session.doors.stance import stance
from narrowgauge.session.models.calls import Calls
from narrowgauge.session.models.compiled import Compiled, bound, given_to, object_of, weak
from narrowgauge.session.models.inner_calls import InnerCalls
from narrowgauge.session.models.naming import named_by
from narrowgauge.session.models.root import Root
from narrowgauge.session.models.roots import Roots
from narrowgauge.session.steps.same_training import SameTraining
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.trained import Trained


class CompiledModels:
    """Tells a session's calls of them.

    Args:
        calls, roots, steps, hearing, same: the session's.
        optimizers: those that the program made and still holds.
    """

    def __init__(
        self, calls: Calls, roots: Roots, steps: Steps, hearing: Hearing, same: SameTraining, optimizers: Trained
    ) -> None:
        self._calls, self._roots, self._steps = calls, roots, steps
        self.hearing, self._same, self._optimizers = hearing, same, optimizers
        self._compiled: dict[int, Compiled] = {}  # by the ids of what was compiled
        self.inner = InnerCalls(hearing, calls.learns)

    @heard_if(lambda self, owner, *given: self._same_compiled(owner, *given))
    def compiled_begins(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Root | None:
        """A compiled function, or a module compiled in place, is called: as a model, unless one is being called."""
        if self._calls.running or inside_backward() or (self._calls.learns() and not self._optimizers):
            return None
        compiled, whose, modules = self._met(owner), object_of(owner, args), given_to(owner, args, kwargs)
        given, models = self._first(compiled, modules), self._roots.taken
        root = compiled.root(whose if given is None else given)
        if root is None and whose is not None:  # evaluated, what it holds is asked for, and not its object
            root = compiled.root(whose)
        if root is None:
            root = self._take(self._models(compiled, owner, whose, given, modules))
            if root is None:
                self._evaluates(owner, whose, modules)
                return None
            compiled.knows(whose if given is None else given, root)
        elif modules:
            self._take_more(compiled, modules)
        alone = self._calls.alone
        if alone.rest.on and self._roots.taken == models and alone.passes(root, args, kwargs):
            return root
        self._calls.begins(root, args, kwargs)
        if (args or kwargs) and not isinstance(owner, nn.Module) and self._shows():
            self.inner.begin(self._roots.living(), self._steps.batches, self._calls.tokens)
        return root

    def _shows(self) -> bool:
        """Whether the call that begins is of training, and of a recorded step, in which it runs uncompiled."""
        line = self._steps.line
        recorded = line is not None and line.recorded and not self._steps.paused
        return recorded and self._calls.training and stance() == "force_eager"

    def compiles(self) -> None:
        """Something is compiled, or about to be."""
        self._calls.alone.loud()

    def learns(self) -> bool:
        """As of any call."""
        return self._calls.learns()

    def _same_compiled(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        if not self._calls.learns() or not self._optimizers:
            return None
        compiled, whose = self._met(owner), object_of(owner, args)
        given = self._first(compiled, given_to(owner, args, kwargs))
        root = compiled.root(whose if given is None else given)
        if root is not None:
            return self._same.model(root)
        models = self._models(compiled, owner, whose, given)
        return self._same.module(models[0]) if models else None

    @heard
    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's compiled step is called, and no forward or backward in it: what it ends is seen as a whole."""
        if optimizer in self._optimizers and not inside_backward():
            self._steps.looked()

    def compiled_ended(self, known: Root | None, output: Any, *, left: bool) -> None:
        """Its call returned, or was `left` by an error."""
        self._settle()
        if known is not None:  # else it may be within the call of another
            self.inner.end(whole=not left)
            alone = self._calls.alone
            if not (alone.rest.on and alone.passed()):
                self._calls.ended(known, output, None, left)

    @heard
    def _settle(self) -> None:
        self._steps.settle()

    def _evaluates(self, owner: Any, whose: Any, given: Sequence[nn.Module]) -> None:
        """What is called without gradients, and never was with them, may be an evaluation: of what it has in it."""
        if torch.is_grad_enabled():
            return
        modules = [owner] if isinstance(owner, nn.Module) else given or named_by(bound(owner, whose))
        for module in modules:
            if not self._steps.evals.knows(module):
                self._steps.evals.module_called(module, self._optimizers.ids)

    def _met(self, owner: Any) -> Compiled:
        """What is known of it, not of another at whose address it is."""
        known = self._compiled.get(id(owner))
        if known is None or not known.of(owner):
            known = self._compiled[id(owner)] = Compiled(owner)
        return known

    def _first(self, compiled: Compiled, given: Sequence[nn.Module]) -> nn.Module | None:
        """The first model that a compiled function is given."""
        for module in given:
            if compiled.root(module) is not None:  # which asks none of those beside it
                return module
        return next((module for module in given if module in self._roots or self._owns(module)), None)

    def _owns(self, module: nn.Module) -> bool:
        return torch.is_grad_enabled() and self._optimizers.owns(module)

    def _take(self, models: Sequence[nn.Module]) -> Root | None:
        first, *more = models or (None,)
        root = None if first is None else self._calls.take(first)
        for module in more:  # nobody else may hear of it
            if module not in self._roots:
                self._calls.take(module)
        return root

    def _take_more(self, compiled: Compiled, given: Sequence[nn.Module]) -> None:
        """Of a known call: models that it was not given so far."""
        for module in given:
            if id(module) not in compiled.looked_at and torch.is_grad_enabled():
                compiled.looked_at.add(id(module))
                if module not in self._roots and self._new(module):
                    self._calls.take(module)

    def _models(
        self, compiled: Compiled, owner: Any, whose: Any, given: nn.Module | None, beside: Sequence[nn.Module] = ()
    ) -> Sequence[nn.Module]:
        """Those that it calls; its call is told as that of the first."""
        if not torch.is_grad_enabled():
            return ()
        if isinstance(owner, nn.Module):
            return (owner,) if self._optimizers.owns(owner) else ()
        if given is not None:
            named = named_by(bound(owner, whose))
            return _outermost((given, *(module for module in (*beside, *named) if self._new(module))))
        helped, models = compiled.helps
        if len(self._roots) and models == self._roots.taken and whose is (helped and helped()):
            return ()
        named = named_by(bound(owner, whose))
        found = _outermost(module for module in named if module in self._roots or self._new(module))
        if not found and not len(self._roots):
            whole = self._roots.whole(self._optimizers)
            return () if whole is None else (whole,)
        if not found and (whose is None or weak(whose) is not None):  # until there is another model
            compiled.helps = weak(whose), self._roots.taken
        return found

    def _new(self, module: nn.Module) -> bool:
        """Whether it is trained, and no part of a model that is known, of which it may read no more than a weight."""
        return self._optimizers.owns(module) and self._roots.around(module) is None


def _outermost(modules: Iterable[nn.Module]) -> Sequence[nn.Module]:
    """Those that are in no other of them: a wrapper, and not what it wraps."""
    found = {id(module): module for module in modules}
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return [module for at, module in found.items() if at not in inner]
