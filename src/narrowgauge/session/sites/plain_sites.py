"""Layers that nobody converted: what FP8 would do to their tensors, or what they do themselves.

    recorded step     each product's input, weight and grad_output go through the recipe's quantizers, or through those
                      of the layer if it has its own; what they become is counted and thrown away
    other steps       no hook is there: nothing is paid

Which layers are known, and how, lies beside this. Products of torch's functions with a parameter are heard where no
layer tells of them. What becomes of a product's tensors is `showing`'s business. What is not seen is named in the run's
notes.

A compiled graph hears no hooks that come later. So a recorded step runs as if nothing had been compiled, or in graphs
of its own (`choice`), and the next one uses the graphs again as they are. What was compiled before the watch stays
compiled, and is not seen inside, but for layers that were converted, whose operators look themselves. So does all that
a converted run compiles. Graphs ask whether torch's functions are those that they were made with: while such a call
runs, and only then, products are not listened to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.compute.nn.observer import Observer
from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.compute.recipes import by_name
from narrowgauge.session.doors.compilations import Whose
from narrowgauge.session.doors.compiled_graphs import launched
from narrowgauge.session.doors.hearing import unreal
from narrowgauge.session.sites.census import Census, plain_name
from narrowgauge.session.sites.choice import Choice
from narrowgauge.session.sites.known import kind_of, weight_shape
from narrowgauge.session.sites.layer import Before, Layer
from narrowgauge.session.sites.outside import Outside
from narrowgauge.session.sites.part import Part, is_plain
from narrowgauge.session.sites.products import Products
from narrowgauge.session.sites.running import Running
from narrowgauge.session.sites.said import AT_ONCE, CLOSED, CONVERTED, UNTOLD
from narrowgauge.session.sites.showing import Showing

_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing


class PlainSites:
    """The layers of a program's models that narrowgauge did not convert.

    Args:
        recipe: the name of the one that they are judged by, which keeps no state; without one, none is looked at.
        eager: whether a recorded step runs uncompiled.
        training: whether a training forward is running, asked at each layer's call.
        compiles: whether the program has compiled anything, asked at each recorded step.
        followed: whether calls of anything that it compiled are followed, asked then.
        telling: whether `compiled_runs` is told of each call that runs compiled, asked then.
        eagerly: makes what it compiled run uncompiled, meanwhile.
        unheard: while it is open, nobody hears what the program does.
        mine: whether what the calling thread multiplies is of the training, asked at each layer's call.
        in_graphs: makes what it compiled run in graphs that are kept for such steps, meanwhile; tells of an error.
        inside: whether a call of what it compiled is running.
        choice: which of both ways a recorded step of a compiled program goes.
        told: is told what failed.

    Attributes:
        shown: what became of the tensors.
        uncompiled: whether what the program compiled ran uncompiled in the latest recorded step.
    """

    def __init__(
        self,
        recipe: str,
        *,
        eager: bool,
        training: Callable[[], bool],
        compiles: Callable[[], bool] = lambda: False,
        followed: Callable[[], bool] = lambda: True,
        telling: Callable[[], bool] = lambda: False,
        eagerly: Callable[[], AbstractContextManager[object]] = lambda: torch.compiler.set_stance("force_eager"),
        unheard: Callable[[], AbstractContextManager[object]] = nullcontext,
        mine: Callable[[], bool] = lambda: True,
        in_graphs: Callable[[Callable[[Exception], None]], AbstractContextManager[object]] = lambda failed: (
            nullcontext()
        ),
        inside: Callable[[], bool] = lambda: False,
        choice: Choice | None = None,
        told: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.shown = Showing(by_name(recipe) if recipe else None, training, mine, told)
        self._eager, self._compiles, self._followed, self._mine = eager, compiles, followed, mine
        self._telling = telling
        self._eagerly, self._unheard = eagerly, unheard
        self._in_graphs, self._inside, self.choice = in_graphs, inside, choice or Choice("uncompiled")
        self._layers: list[Layer] = []
        self._beside: dict[Callable[[], AbstractContextManager[None]], None] = {}  # what kinds of layers have to hear
        self._census = Census()
        self._products = Products(self._heard, self.shown.said.failed, lambda: self._running.tells())
        self._outside = Outside(self._census.lacks)
        self._steps = self._ident = 0
        self.uncompiled = self._graphs = False
        self._compiled: set[Whose] = set()  # whose calls have run compiled
        self._untold = False  # nobody told of them, and products were not listened to
        self._launched = False  # what is compiled leaves its CUDA graphs aside, in this step
        self._open = ExitStack()
        self._listening = False  # in a recorded step, of which not all has been seen
        self._running = Running()

    def add(self, model: nn.Module, observer: Observer) -> list[str]:
        """Take in the layers of a model; those that are of a known kind, and no model's that was taken before."""
        if self.shown.recipe is None:
            return []
        self._census.add(model, observer)
        self._outside.begin_anew()
        self._layers = [layer for layer in self._layers if layer.module is not None]
        self._look_again()
        taken = {id(layer.module) for layer in self._layers}
        found = [
            Layer(plain_name(name), module, kind, observer, self)
            for name, module in model.named_modules()
            if id(module) not in taken and (kind := kind_of(module)) is not None
        ]
        self._layers += found
        self._beside |= dict.fromkeys(heard for layer in found if (heard := getattr(layer.kind, "heard", None)))
        return [layer.name for layer in found]

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
            if not kind.in_graph and self._compiles():
                self.choice.refuse(f"{type(module).__name__} cannot be seen in a graph")

    def why(self) -> str:
        """What makes recorded steps of this program long, in words; "" if nothing does that is known."""
        if not self.uncompiled:
            return ""
        because = f", as {self.choice.refused}" if self.choice.refused else ""
        return f"what it compiled ran uncompiled{because}"

    @property
    def notes(self) -> list[str]:
        """What was not looked at; empty if everything was."""
        notes = [*self.shown.notes, *self.choice.notes, *self._outside.notes]
        closed = {"unheard"} if self._eager else {"unheard", "followed"}
        if self._steps and self._compiled & closed and self._census.lacks():
            notes.append(CLOSED if self._eager else CONVERTED)
        if self._untold:
            notes.append(UNTOLD)
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
        self._running = Running()
        self._open.callback(self._unhook)
        compiles = self._compiles()
        eager = self._eager and self._followed()
        self._graphs = compiles and eager and self.choice.begin()
        self.uncompiled = compiles and eager and not self._graphs
        told, self._ident, self._launched = self._telling(), threading.get_ident(), False
        hook = Layer.hook_in_graphs if self._graphs else Layer.hook
        self._layers = [layer for layer in self._layers if hook(layer)]
        if self._graphs:  # nothing but layers has to be heard: that was made sure
            self._open.enter_context(launched(self._unheard))
            self._open.enter_context(self._in_graphs(self._failed))
            return
        for heard in self._beside:
            self._open.enter_context(heard())
        if not compiles and not self._outside.expected():
            return
        if told or self.uncompiled or not compiles:
            self._products.open()
            self._open.callback(self._products.close)
            if self._products.elsewhere():
                self.shown.said.say(AT_ONCE)
        else:
            self._untold = True  # their graphs would be made anew for functions that come and go
        if compiles:
            self._open.enter_context(self._eagerly() if eager else launched(self._unheard))

    def compiled_runs(self, whose: Whose) -> Callable[[], None]:
        """As `HearsGraphs` says: meanwhile torch's functions are those that its graphs were made with."""
        self._compiled.add(whose)
        back = self._products.aside()
        try:
            if self._listening and threading.get_ident() == self._ident:
                self._launch(whose)
            elif self._listening and not (self._graphs or inside_backward()):
                self.shown.said.say(AT_ONCE)
        except Exception as error:
            self.compiled_unheard(error)
        return back

    def compiled_unheard(self, error: Exception) -> None:
        """So is this."""
        self.shown.said.failed("a call of something compiled", error)

    def _launch(self, whose: Whose) -> None:
        """Where the step runs uncompiled, converted layers in what does not would be silent in a CUDA graph."""
        if whose == "unheard" and self.uncompiled and not self._launched:
            self._launched = True
            self._open.enter_context(launched(self._unheard))

    def end(self, *, seen: bool = False) -> None:
        """It ended, or all of it was `seen`: no hook is left, and no parameter held."""
        if self._listening:
            self._listening = False
            if seen and (self._graphs or self.uncompiled):
                self.choice.ended(frozenset(self.shown.heard), self._inside())
            self._open.close()
            self._census.end()
            self._outside.ended(bool(self.shown.heard))

    def _failed(self, error: Exception) -> None:
        """The compiler could not make a graph for a recorded step."""
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self.choice.refuse(f"torch could not compile them ({cause})")

    def _unhook(self) -> None:
        for layer in self._layers:
            layer.unhook()

    def begins(self, layer: Layer, module: nn.Module, args: tuple[Any, ...]) -> None:
        """As `HearsLayers` says; so are the next ones."""
        if not torch.compiler.is_dynamo_compiling():
            self._running.begins(layer)

    def ended(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        """Show what it multiplied, unless a product inside of it was heard.

        Without an output nothing is shown: torch passes no keywords where the hook is taken away while it is called.
        """
        if torch.compiler.is_dynamo_compiling():
            return
        running = self._running.ended(layer)
        if running is None or output is None or running.heard:
            return
        if layer.before is None or not self._called_again(layer, layer.before, module, args, output):
            self.called(layer, module, args, kwargs, output)

    def left(self) -> None:
        """The calls of this thread that have not returned never will."""
        self._running.forget()

    def called(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Show what it multiplied."""
        if unreal():
            return
        try:
            unseen_by_modes(self._show, layer, module, args, kwargs, output)
        except Exception as error:
            self.shown.said.failed(f"a call of {layer.name or type(module).__name__}", error)

    def _called_again(
        self, layer: Layer, before: Before, module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> bool:
        """The same of what was called before: False where it is not as simple. Of replicas, others have the weight."""
        x = args[0] if args else None
        if type(x) is not Tensor or module is not layer.module or layer.changed:
            return False
        if _modes() or _function_modes() or _transforms() or _tracing() or self._census.spread:
            return False
        try:
            product = before.product(module, x)
            if product is None or (self.uncompiled and not (layer.kind.in_graph and type(product[0]) is nn.Parameter)):
                return False
            return self.shown.use_again(before.state, x, output, *product) is not None
        except Exception as error:
            self.shown.said.failed(f"a call of {layer.name or type(module).__name__}", error)
            return True

    def input_in_graph(self, layer: Layer, x: Tensor) -> None:
        """Show it, and the layer's weight."""
        module = layer.module
        if module is None or not self._listening:
            return
        try:
            if layer.before is not None and self._input_again(layer, layer.before, module, x):
                return
            (part,) = layer.kind.parts(module, (x,), {}, None)
            if not inside_backward():
                layer.latest = self._at_gradient(layer, part) if self._mine() else None
            try:
                self.shown.use(layer.name, layer.observer, part, self._held_by(module, part))
                if layer.before is None:
                    layer.before = self._before(layer, module, part)
            finally:
                part.x = part.w = None  # an input that is held would be memory until the next such step
        except Exception as error:
            self.shown.said.failed(f"a call of {layer.name} in a graph", error)

    def _input_again(self, layer: Layer, before: Before, module: nn.Module, x: Tensor) -> bool:
        """The same of what was called before, as in `_called_again`."""
        product = None if self._census.spread or inside_backward() else before.product(module, x)
        wanted = None if product is None else self.shown.use_again(before.state, x, None, *product)
        if product is None or wanted is None:
            return False
        layer.latest = partial(self.shown.gradient_again, before.state, wanted, product[1])
        return True

    def gradient_in_graph(self, layer: Layer, dy: Tensor) -> None:
        """Show it."""
        if layer.latest is not None:
            layer.latest(dy)

    def _at_gradient(self, layer: Layer, part: Part) -> Callable[[Tensor], None]:
        wanted = layer.observer.wants(layer.name)
        return partial(self.shown.gradient, layer.name, layer.observer, part, wanted)

    def _show(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        parts = layer.kind.parts(module, args, kwargs, output)
        if self.uncompiled and not (layer.kind.in_graph and len(parts) == 1 and is_plain(parts[0])):
            self.choice.refuse(f"{type(module).__name__} cannot be seen in a graph")
        for part in parts:
            known = layer.module or module  # of which `module` may be a replica
            self.shown.use(layer.name + part.suffix, layer.observer, part, self._held_by(known, part))
        if layer.before is None and len(parts) == 1 and parts[0].y is not None:
            layer.before = self._before(layer, module, parts[0])
        if parts and not layer.kind.whole:
            kind = type(module).__name__
            self.shown.said.say(f"Layers of class {kind} are judged as linear layers of their input and gradient.")

    def _before(self, layer: Layer, module: nn.Module, part: Part) -> Before | None:
        """What the next call need not find out, if this was a simple one."""
        product, state = getattr(layer.kind, "product", None), self.shown.state_of(layer.name, layer.observer)
        if product is None or state is None or part.x is None or module is not layer.module:
            return None
        now = product(module, part.x)
        return Before(product, state) if now is not None and now[0] is part.w else None

    def _held_by(self, module: nn.Module, part: Part) -> Tensor | None:
        """Count a part's weight as seen; what it is between its uses."""
        own, name = module._parameters, None
        if part.w is not None:
            name = "weight" if own.get("weight") is part.w else next((n for n in own if own[n] is part.w), None)
        owner = None if part.w is None or name is not None else self._census.owner(part.w)
        if owner is not None:
            return self._census.saw(owner.module, owner.name)
        self._census.saw(module, *part.holds)
        return self._census.kept(module, name or "")

    def _heard(self, part: Part, known: bool) -> None:
        """A product outside of layers that tell of themselves."""
        if part.w is None:
            return
        inside = self._running.innermost()
        owner = self._census.owner(part.w) if known else None
        module = None if inside is None else inside.layer.module
        if self.uncompiled and (inside or owner) is not None:
            self.choice.refuse("it multiplies outside of known layers")
        # Its weight, or what it computed of it.
        own = tuple(part.w.shape) == weight_shape(module) if owner is None else owner.module is module
        if inside is not None and module is not None and own:
            inside.heard = True
            self._census.saw(module)
            self._outside.hears()
            kept = None if owner is None else self._census.kept(owner.module, owner.name)
            self.shown.use(inside.layer.name, inside.layer.observer, part, kept)
            return
        if owner is not None:
            self._outside.hears()
            self.shown.use(owner.site, owner.observer, part, self._census.saw(owner.module, owner.name))
