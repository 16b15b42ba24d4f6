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
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.session.doors.hearing import Hearing, heard, heard_if
from narrowgauge.session.models.calls import Calls
from narrowgauge.session.models.naming import modules_in, named_by, of_class
from narrowgauge.session.models.root import Root
from narrowgauge.session.models.roots import Roots
from narrowgauge.session.steps.same_training import SameTraining
from narrowgauge.session.steps.steps import Steps
from narrowgauge.session.steps.trained import Trained

_NO_DATA = int, float, str, type(None)  # what no model is called with alone


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
        self._known: dict[tuple[int, int], Root] = {}  # by ids: of what was compiled, and is given
        self._helpers: dict[tuple[int, int], int] = {}  # what names no model, and how many models there were
        self._met: dict[int, ref[Any] | None] = {}  # what those ids are of; None where it cannot be told

    @heard_if(lambda self, owner, *given: self._same_compiled(owner, *given))
    def compiled_begins(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Root | None:
        """A compiled function, or a module compiled in place, is called: as a model, unless one is being called."""
        if self._calls.running or not self._optimizers or inside_backward():
            return None
        modules, whose = _given(owner, args, kwargs), _object(owner, args)
        self._meets(owner)
        if whose is not None:
            self._meets(whose)
        given = self._first(owner, modules)
        at = id(owner), id(given or whose)
        root = self._known.get(at)
        if root is None or not root.alive:  # or an address that is used again
            root = self._take(self._models(owner, whose, given, modules))
            if root is None:
                self._evaluates(owner, modules)
                return None
            self._known[at] = root
        self._calls.begins(root, args, kwargs)
        return root

    def learns(self) -> bool:
        """As of any call."""
        return self._calls.learns()

    def _same_compiled(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        if not self._calls.learns() or not self._optimizers:
            return None
        given, whose = self._first(owner, _given(owner, args, kwargs)), _object(owner, args)
        root = self._known.get((id(owner), id(given or whose)))
        if root is not None and root.alive:
            return self._same.model(root)
        models = self._models(owner, whose, given)
        return self._same.module(models[0]) if models else None

    @heard
    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's compiled step is called, and no forward or backward in it: what it ends is seen as a whole."""
        if optimizer in self._optimizers and not inside_backward():
            self._steps.looked()

    def compiled_ended(self, known: Root | None, output: Any) -> None:
        """Its call returned."""
        self._settle()
        if known is not None:
            self._calls.ended(known, output)

    @heard
    def _settle(self) -> None:
        self._steps.settle()

    def _evaluates(self, owner: Any, given: Sequence[nn.Module]) -> None:
        """What is called without gradients, and never was with them, may be an evaluation: of what it has in it."""
        if torch.is_grad_enabled():
            return
        modules = [owner] if isinstance(owner, nn.Module) else given or named_by(owner)
        for module in modules:
            if not self._steps.evals.knows(module):
                self._steps.evals.module_called(module, self._optimizers.ids)

    def _meets(self, one: Any) -> None:
        """Forget what is known of another function or object, at whose address this one is."""
        at = id(one)
        known = self._met.get(at)
        if at in self._met and (known is None or known() is one):
            return
        try:
            self._met[at] = ref(one)
        except TypeError:  # an object with slots
            self._met[at] = None
        self._helpers = {of: models for of, models in self._helpers.items() if at not in of}
        self._known = {of: root for of, root in self._known.items() if at not in of}

    def _first(self, owner: Any, given: Sequence[nn.Module]) -> nn.Module | None:
        """The first model that a compiled function is given."""
        for module in given:
            known = self._known.get((id(owner), id(module)))
            if known is not None and known.alive:  # which asks none of those beside it
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

    def _models(
        self, owner: Any, whose: Any, given: nn.Module | None, beside: Sequence[nn.Module] = ()
    ) -> Sequence[nn.Module]:
        """Those that it calls; its call is told as that of the first."""
        if not torch.is_grad_enabled():
            return ()
        if isinstance(owner, nn.Module):
            return (owner,) if self._optimizers.owns(owner) else ()
        if given is not None:
            return _outermost((given, *(module for module in beside if self._new(module))))
        at = id(owner), id(whose)
        if len(self._roots) and self._helpers.get(at) == self._roots.taken:
            return ()
        named = named_by(owner if whose is None else MethodType(owner, whose))
        found = _outermost(module for module in named if module in self._roots or self._new(module))
        if not found and not len(self._roots):
            whole = self._roots.whole(self._optimizers)
            return () if whole is None else (whole,)
        if not found:  # until there is another model
            self._helpers[at] = self._roots.taken
        return found

    def _new(self, module: nn.Module) -> bool:
        """Whether it is trained, and no part of a model that is known, of which it may read no more than a weight."""
        return self._optimizers.owns(module) and self._roots.around(module) is None


def _outermost(modules: Iterable[nn.Module]) -> Sequence[nn.Module]:
    """Those that are in no other of them: a wrapper, and not what it wraps."""
    found = {id(module): module for module in modules}
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return [module for at, module in found.items() if at not in inner]


def _object(owner: Any, args: tuple[Any, ...]) -> Any:
    """What a method is called of that was compiled in its class, as a function."""
    if type(owner) is not FunctionType or not args or isinstance(args[0], nn.Module):
        return None
    return None if next(of_class(type(args[0]), owner.__name__), None) is None else args[0]


def _given(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[nn.Module]:
    """The modules that a compiled function is given to call, with something to call them with."""
    while isinstance(owner, partial):
        owner, args, kwargs = owner.func, (*owner.args, *args), owner.keywords | kwargs
    calls = not torch.is_grad_enabled()  # else what an object holds may be no more than asked for its weights
    given = [(x, modules_in(x) if calls or isinstance(x, nn.Module) else ()) for x in (*args, *kwargs.values())]
    modules = [module for _, found in given for module in found]
    data = any(not found and not isinstance(x, _NO_DATA) for x, found in given)
    return modules if data else ()
