"""Layers that nobody converted: what FP8 would do to their tensors, or what they do themselves.

    recorded step     each product's input, weight and grad_output go through the recipe's quantizers, or through those
                      of the layer if it has its own; what they become is counted and thrown away
    other steps       no hook is there: nothing is paid

Which layers are known, and how, lies beside this. Products of torch's functions with a parameter are heard where no
layer tells of them. What becomes of a product's tensors is `showing`'s business. What is not seen is named in the run's
notes.

A compiled graph hears no hooks that come later. So a recorded step runs as if nothing had been compiled, and the next
one uses the graphs again as they are. Where all that was compiled is older than the watch, nobody tells when it is
called and returns: it stays compiled and is not seen inside, but for layers that were converted, whose operators look
themselves. So do those of a converted run, which stays compiled as well.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.compute.recipes import by_name
from narrowgauge.session.doors.compiled_graphs import launched
from narrowgauge.session.doors.hearing import unreal
from narrowgauge.session.sites.census import Census, plain_name
from narrowgauge.session.sites.known import kind_of, weight_shape
from narrowgauge.session.sites.part import Kind, Part
from narrowgauge.session.sites.products import Products
from narrowgauge.session.sites.showing import Showing


class Layer:
    """A module of a known kind.

    Args:
        name: the module's.
        module: the program's, which may drop it.
        kind, observer: how it is looked at, and by whom.
        begins, called: told, as torch's hooks are, before and after each of its calls while hooked.
    """

    _numbers = itertools.count(2)

    def __init__(
        self,
        name: str,
        module: nn.Module,
        kind: Kind,
        observer: Observer,
        begins: Callable[..., None],
        called: Callable[..., None],
    ) -> None:
        self.name, self.kind, self.observer = name, kind, observer
        self._known = ref(module)
        self._begins, self._called = partial(begins, self), partial(called, self)
        self._number = -next(Layer._numbers)  # torch's own hooks have none below zero

    @property
    def module(self) -> nn.Module | None:
        """The module; None once it is gone."""
        return self._known()

    def hook(self) -> bool:
        """Be told of its calls; False if it is gone.

        As `register_forward_hook` does it, which takes ten times as long: there is a layer for every few tensors.
        First of all hooks that come after: a sharded weight is whole here, and perhaps not after them.
        """
        module, number = self._known(), self._number
        if module is None:
            return False
        module._forward_pre_hooks[number] = self._begins
        module._forward_hooks[number] = self._called
        module._forward_hooks.move_to_end(number, last=False)  # type: ignore[attr-defined]
        module._forward_hooks_with_kwargs[number] = module._forward_hooks_always_called[number] = True
        return True

    def unhook(self) -> None:
        """Be told no more; twice is harmless."""
        module, number = self._known(), self._number
        if module is not None and module._forward_hooks.pop(number, None) is not None:
            module._forward_pre_hooks.pop(number, None)
            module._forward_hooks_with_kwargs.pop(number, None)
            module._forward_hooks_always_called.pop(number, None)


@dataclass(eq=False)
class Running:
    """A known module's call that has not returned."""

    layer: Layer
    heard: bool = False  # a product inside of it was shown in its name


class PlainSites:
    """The layers of a program's models that narrowgauge did not convert.

    Args:
        recipe: the name of the one that they are judged by, which keeps no state; without one, none is looked at.
        eager: whether a recorded step runs uncompiled.
        training: whether a training forward is running, asked at each layer's call.
        compiles: whether the program has compiled anything, asked at each recorded step.
        followed: whether calls of anything that it compiled are followed, asked then.
        eagerly: makes what it compiled run uncompiled, meanwhile.
        unheard: while it is open, nobody hears what the program does.
        mine: whether what the calling thread multiplies is of the training, asked at each layer's call.

    Attributes:
        shown: what became of the tensors.
        uncompiled: whether what the program compiled ran uncompiled in a recorded step.
    """

    def __init__(
        self,
        recipe: str,
        *,
        eager: bool,
        training: Callable[[], bool],
        compiles: Callable[[], bool] = lambda: False,
        followed: Callable[[], bool] = lambda: True,
        eagerly: Callable[[], AbstractContextManager[object]] = lambda: torch.compiler.set_stance("force_eager"),
        unheard: Callable[[], AbstractContextManager[object]] = nullcontext,
        mine: Callable[[], bool] = lambda: True,
    ) -> None:
        self.shown = Showing(by_name(recipe) if recipe else None, training, mine)
        self._eager, self._compiles, self._followed = eager, compiles, followed
        self._eagerly, self._unheard = eagerly, unheard
        self._layers: list[Layer] = []
        self._census = Census()
        self._products = Products(self._heard, self.shown.failed, self._told)
        self._steps = 0
        self.uncompiled = False
        self._deaf = False  # products were not listened to
        self._open = ExitStack()
        self._listening = False  # in a recorded step, of which not all has been seen
        self._running = threading.local()

    def add(self, model: nn.Module, observer: Observer) -> int:
        """Take in the layers of a model; how many of them are of a known kind, and no model's that was taken before."""
        if self.shown.recipe is None:
            return 0
        self._census.add(model, observer)
        taken = {id(layer.module) for layer in self._layers}
        found = [
            Layer(plain_name(name), module, kind, observer, self._begins, self._called)
            for name, module in model.named_modules()
            if id(module) not in taken and (kind := kind_of(module)) is not None
        ]
        self._layers += found
        return len(found)

    @property
    def notes(self) -> list[str]:
        """What was not looked at; empty if everything was."""
        notes = self.shown.notes
        if self._deaf and self._eager:
            notes.append(
                "What was compiled before the watch began is not seen inside, its steps are. Call torch.compile after "
                "ng.watch to see its layers."
            )
        elif self._deaf:
            notes.append(
                "Products outside of known layers are not recorded: the program compiles, and converted layers are "
                "watched in its graphs."
            )
        unseen = self._census.unseen() if self._steps else ""
        if unseen:
            notes.append(f"Not seen as a weight in any recorded step: {unseen}.")
        return notes

    def begin(self) -> None:
        """A recorded step begins."""
        self.end()
        self._listening = True
        self.shown.begin()
        self._census.begin()
        if self.shown.recipe is None:
            return
        self._steps += 1
        self._running = threading.local()
        self._open.callback(self._unhook)
        self._layers = [layer for layer in self._layers if layer.hook()]
        compiles = self._compiles()
        eager = self._eager and self._followed()
        self.uncompiled |= compiles and eager
        self._deaf = compiles and not eager  # a graph would be made anew for functions that come and go
        if not self._deaf:
            self._products.open()
            self._open.callback(self._products.close)
        if compiles:
            self._open.enter_context(self._eagerly() if eager else launched(self._unheard))

    def end(self) -> None:
        """It ended: no hook is left, and no parameter held."""
        if self._listening:
            self._listening = False
            self._open.close()
            self._census.end()

    def _unhook(self) -> None:
        for layer in self._layers:
            layer.unhook()

    def _calls(self) -> list[Running]:
        calls: list[Running] | None = getattr(self._running, "calls", None)
        if calls is None:
            calls = self._running.calls = []
        return calls

    def _begins(self, layer: Layer, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self._calls().append(Running(layer))

    def _called(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls()
        at = len(calls) - 1
        while at >= 0 and calls[at].layer is not layer:
            at -= 1
        if at < 0:  # a model that is one layer is followed from its second call on, and heard in its first
            return
        running = calls[at]
        del calls[at:]
        if output is None or running.heard or unreal():
            return
        try:
            unseen_by_modes(self._show, layer, module, args, kwargs, output)
        except Exception as error:
            self.shown.failed(f"a call of {layer.name or type(module).__name__}", error)

    def _show(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        parts = layer.kind.parts(module, args, kwargs, output)
        for part in parts:
            known = layer.module or module  # of which `module` may be a replica
            self.shown.use(layer.name + part.suffix, layer.observer, part, self._held_by(known, part))
        if parts and not layer.kind.whole:
            kind = type(module).__name__
            self.shown.say(f"Layers of class {kind} are judged as linear layers of their input and gradient.")

    def _held_by(self, module: nn.Module, part: Part) -> Tensor | None:
        """Count a part's weight as seen; what it is between its uses."""
        own = module._parameters
        name = next((n for n in own if own[n] is part.w), None) if part.w is not None else None
        owner = None if part.w is None or name is not None else self._census.owner(part.w)
        if owner is not None:
            return self._census.saw(owner.module, owner.name)
        self._census.saw(module, *part.holds)
        return self._census.kept(module, name or "")

    def _told(self) -> bool:
        """Whether a layer runs that tells of all that it multiplies."""
        calls = self._calls()
        return bool(calls) and any(call.layer.kind.whole for call in calls)

    def _heard(self, part: Part, known: bool) -> None:
        """A product outside of layers that tell of themselves."""
        calls = self._calls()
        if part.w is None:
            return
        inside = calls[-1] if calls else None
        owner = self._census.owner(part.w) if known else None
        module = None if inside is None else inside.layer.module
        # Its weight, or what it computed of it.
        own = tuple(part.w.shape) == weight_shape(module) if owner is None else owner.module is module
        if inside is not None and module is not None and own:
            inside.heard = True
            self._census.saw(module)
            kept = None if owner is None else self._census.kept(owner.module, owner.name)
            self.shown.use(inside.layer.name, inside.layer.observer, part, kept)
            return
        if owner is not None:
            self.shown.use(owner.site, owner.observer, part, self._census.saw(owner.module, owner.name))
