"""Layers that nobody converted: what FP8 would do to their tensors, or what they do themselves.

    recorded step     each product's input, weight and grad_output go through the recipe's quantizers, or through those
                      of the layer if it has its own; what they become is counted and thrown away
    other steps       no hook is there: nothing is paid

Which layers are known, and how, lies beside this. Products of torch's functions with a parameter are heard where no
layer tells of them. What is heard, and in whose name it is shown, is `layer_calls`' business; what becomes of a
product's tensors is `showing`'s, and what is different where the program compiles, `compiled_steps`'. What is not seen
is named in the run's notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn

from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.recipes import by_name
from narrowgauge.session.doors.compilations import Compilations
from narrowgauge.session.sites.census import Census, plain_name
from narrowgauge.session.sites.choice import Choice
from narrowgauge.session.sites.compiled_steps import CompiledSteps
from narrowgauge.session.sites.known import kind_of
from narrowgauge.session.sites.layer import Layer
from narrowgauge.session.sites.layer_calls import LayerCalls
from narrowgauge.session.sites.outside import Outside
from narrowgauge.session.sites.products import Products
from narrowgauge.session.sites.said import AT_ONCE
from narrowgauge.session.sites.showing import Showing


class PlainSites:
    """The layers of a program's models that narrowgauge did not convert.

    Args:
        recipe: the name of the one that they are judged by, which keeps no state; without one, none is looked at.
        eager: whether what is compiled may run otherwise in a recorded step, or else as ever.
        training: whether a training forward is running, asked at each layer's call.
        mine: whether what the calling thread multiplies is of the training, asked then, too.
        compilations: what the program compiles.
        choice: how a recorded step runs that, if it may.
        unheard: while it is open, nobody hears what the program does.
        told: is told what failed.

    Attributes:
        shown: what became of the tensors.
        calls: hears of layers' calls.
        compiled: hears of what runs compiled.
    """

    def __init__(
        self,
        recipe: str,
        *,
        eager: bool,
        training: Callable[[], bool],
        mine: Callable[[], bool] = lambda: True,
        compilations: Compilations | None = None,
        choice: Choice | None = None,
        unheard: Callable[[], AbstractContextManager[object]] = nullcontext,
        told: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.shown = Showing(by_name(recipe) if recipe else None, training, mine, told)
        self.choice = choice or Choice("uncompiled")
        self._compilations = compilations or Compilations()
        self._census = Census()
        self._outside = Outside(self._census.lacks)
        self.calls = LayerCalls(self.shown, self._census, self.choice, self._outside, mine)
        self._products = Products(self.calls.multiplied, self.shown.said.failed, self.calls.tells, self._census.vector)
        self._step = ExitStack()
        self.compiled = CompiledSteps(
            *(self._compilations, self.choice, self._products, self.shown, self._step), eager, unheard
        )
        self._layers: list[Layer] = []
        self._beside: dict[Callable[[], AbstractContextManager[None]], None] = {}  # what kinds of layers have to hear
        self._listening = False  # in a recorded step, of which not all has been seen
        self._listened = False  # in any

    def add(self, model: nn.Module, observer: Observer) -> list[str]:
        """Take in the layers of a model; those that are of a known kind, and no model's that was taken before.

        In a recorded step they tell at once, of the call that the model was found by: heard as products outside of
        layers, it would be listened to for good, and graphs be refused.
        """
        if self.shown.recipe is None:
            return []
        self._census.add(model, observer)
        self._outside.begin_anew()
        self._layers = [layer for layer in self._layers if layer.module is not None]
        self._look_again()
        taken = {id(layer.module) for layer in self._layers}
        found = [
            Layer(plain_name(name), module, kind, observer, self.calls)
            for name, module in model.named_modules()
            if id(module) not in taken and (kind := kind_of(module)) is not None
        ]
        self._layers += found
        heard = dict.fromkeys(layer.kind.heard for layer in found if hasattr(layer.kind, "heard"))
        beside = [each for each in heard if each not in self._beside]
        self._beside |= dict.fromkeys(beside)
        if self._listening:
            self._hook(found, beside)
        return [layer.name for layer in found]

    def called(self, module: nn.Module) -> None:
        """A call of `module` runs that its hooks did not tell of: they came in it.

        Only of a model that is one layer that matters. As a product outside of layers it would be listened to for good.
        """
        if self._listening and not self.choice.graphs and kind_of(module) is not None:
            for layer in self._layers:
                if layer.module is module:
                    self.calls.begins(layer, module, ())

    def weights_came(self) -> None:
        """An optimizer got parameters: known modules may have some that they had not."""
        self._census.note_again()
        self._outside.begin_anew()

    def _look_again(self) -> None:
        """The program may have changed what layers are since they were taken in: their weights are computed, say."""
        for layer in self._layers:
            module = layer.module if layer.changed else None
            if module is None or (kind := kind_of(module)) is None:
                continue
            layer.becomes(kind, type(module))
            if not kind.in_graph and self._compilations.any():
                self.choice.refuse(f"{type(module).__name__} cannot be seen in a graph")

    @property
    def notes(self) -> list[str]:
        """What was not looked at; empty if everything was."""
        notes = [*self.shown.notes, *self.choice.notes, *self._outside.notes]
        if self._listened:
            notes += self.compiled.notes(self._census.lacks)
            if unseen := self._census.unseen():
                notes.append(f"Not seen as a weight in any recorded step: {unseen}.")
        return notes

    @property
    def kept_high(self) -> dict[str, Any]:
        """What the facts of a converted run have of what no conversion knows."""
        return {**self.shown.kept_high, "recurrent": self._census.recurrent}

    def begin(self) -> None:
        """A recorded step begins."""
        self.end()
        self._listening = True
        self.shown.begin()
        self._census.begin()
        if self.shown.recipe is None:
            return
        self._listened = True
        self.calls.begin()
        self.compiled.choose()
        self._step.callback(self._unhook)
        self._layers = self._hook(self._layers, self._beside)
        if not self.choice.graphs:
            self._listen()
        self.compiled.begin()

    def _hook(self, layers: list[Layer], beside: Iterable[Callable[[], AbstractContextManager[None]]]) -> list[Layer]:
        """Have those that are still there tell, and hear what their kinds have to hear `beside`."""
        graphs = self.choice.graphs
        hook = Layer.hook_in_graphs if graphs else Layer.hook
        there = [layer for layer in layers if hook(layer)]
        for heard in () if graphs else beside:  # in graphs nothing but layers has to be heard: that was made sure
            self._step.enter_context(heard())
        return there

    def _listen(self) -> None:
        """Hear products that no layer tells of."""
        listens = self.compiled.listens if self.compiled.some else self._outside.expected
        if listens():
            self._products.open()
            self._step.callback(self._products.close)
            if self._products.elsewhere():
                self.shown.said.say(AT_ONCE)

    def end(self, *, seen: bool = False) -> None:
        """It ended, or all of it was `seen`: no hook is left, and no parameter held."""
        if self._listening:
            self._listening = False
            self.calls.end()
            self.compiled.end(seen=seen)
            self._step.close()
            self._census.end()
            self._outside.ended(bool(self.shown.heard))

    def _unhook(self) -> None:
        for layer in self._layers:
            layer.unhook()
