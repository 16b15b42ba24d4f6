"""From a layer's call to its tensors: whoever tells of it, what it multiplied is shown once, in its name.

    who tells                        of what                   what is shown
    hooks (`layer`)                  a call, and its end       what its kind says, unless a product inside was heard
    operators in graphs (`in_graph`) its input, its gradient   these, and its weight
    torch's functions (`products`)   any other product         that, as the running layer's, or its parameter's owner's

A call that is one product, as one before was, is not taken apart again. Where a step runs uncompiled, it shows whether
a graph could tell of all that was heard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.session.doors.hearing import unreal
from narrowgauge.session.sites.census import Census
from narrowgauge.session.sites.choice import Choice
from narrowgauge.session.sites.known import weight_shape
from narrowgauge.session.sites.layer import Before, Layer
from narrowgauge.session.sites.outside import Outside
from narrowgauge.session.sites.part import Part, is_plain
from narrowgauge.session.sites.running import Running
from narrowgauge.session.sites.showing import Showing

_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing


class LayerCalls:
    """Hears layers, and products beside them, while a recorded step is open.

    Args:
        shown: what becomes of the tensors.
        census: whose the parameters are; told which of them were multiplied.
        choice: whether the step runs uncompiled; told what a graph could not tell of.
        outside: told of products that no kind tells of.
        mine: whether what the calling thread multiplies is of the training, asked at each call.
    """

    def __init__(
        self, shown: Showing, census: Census, choice: Choice, outside: Outside, mine: Callable[[], bool]
    ) -> None:
        self._shown, self._census, self._choice, self._outside = shown, census, choice, outside
        self._mine = mine
        self._running = Running()
        self._open = False

    def begin(self) -> None:
        """A recorded step begins; what an earlier one has left is over."""
        self._running, self._open = Running(), True

    def end(self) -> None:
        """It ended. A graph that was made for such a step may still run: nothing of it is looked at."""
        self._open = False

    def left(self) -> None:
        """The calls of this thread that have not returned never will."""
        self._running.forget()

    def tells(self) -> bool:
        """Whether a layer runs that tells of all that it multiplies."""
        return self._running.tells()

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

    def called(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Show what it multiplied."""
        if unreal():
            return
        try:
            unseen_by_modes(self._show, layer, module, args, kwargs, output)
        except Exception as error:
            self._shown.said.failed(f"a call of {layer.name or type(module).__name__}", error)

    def _called_again(
        self, layer: Layer, before: Before, module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> bool:
        """The same of what was called before: False where it is not as simple. Of replicas, others have the weight."""
        x = args[0] if args else None
        if type(x) is not Tensor or not layer.is_still(module):
            return False
        if _modes() or _function_modes() or _transforms() or _tracing() or self._census.spread:
            return False
        try:
            product = before.product(module, x)
            if product is None:
                return False
            if self._choice.uncompiled and not (layer.kind.in_graph and type(product[0]) is nn.Parameter):
                return False
            return self._shown.use_again(before.used, x, output, *product) is not None
        except Exception as error:
            self._shown.said.failed(f"a call of {layer.name or type(module).__name__}", error)
            return True

    def _show(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        parts = layer.kind.parts(module, args, kwargs, output)
        if self._choice.uncompiled and not (layer.kind.in_graph and len(parts) == 1 and is_plain(parts[0])):
            self._choice.refuse(f"{type(module).__name__} cannot be seen in a graph")
        for part in parts:
            known = layer.module or module  # of which `module` may be a replica
            self._shown.use(layer.name + part.suffix, layer.observer, part, self._census.multiplied(known, part))
        if layer.before is None and len(parts) == 1 and parts[0].y is not None:
            layer.seen(module, parts[0], self._shown.used_before(layer.name, layer.observer))
        if parts and not layer.kind.whole:
            kind = type(module).__name__
            self._shown.said.say(f"Layers of class {kind} are judged as linear layers of their input and gradient.")

    def input_in_graph(self, layer: Layer, x: Tensor) -> None:
        """Show it, and the layer's weight."""
        module = layer.module
        if module is None or not self._open:
            return
        try:
            if layer.before is not None and self._input_again(layer, layer.before, module, x):
                return
            (part,) = layer.kind.parts(module, (x,), {}, None)
            if not inside_backward():
                layer.latest = self._at_gradient(layer, part) if self._mine() else None
            try:
                self._shown.use(layer.name, layer.observer, part, self._census.multiplied(module, part))
                if layer.before is None:
                    layer.seen(module, part, self._shown.used_before(layer.name, layer.observer))
            finally:
                part.x = part.w = None  # an input that is held would be memory until the next such step
        except Exception as error:
            self._shown.said.failed(f"a call of {layer.name} in a graph", error)

    def _input_again(self, layer: Layer, before: Before, module: nn.Module, x: Tensor) -> bool:
        """The same of what was called before, as in `_called_again`."""
        product = None if self._census.spread or inside_backward() else before.product(module, x)
        wanted = None if product is None else self._shown.use_again(before.used, x, None, *product)
        if product is None or wanted is None:
            return False
        layer.latest = partial(self._shown.gradient_again, before.used, wanted, product[1])
        return True

    def _at_gradient(self, layer: Layer, part: Part) -> Callable[[Tensor], None]:
        wanted = layer.observer.wants(layer.name)
        return partial(self._shown.gradient, layer.name, layer.observer, part, wanted)

    def gradient_in_graph(self, layer: Layer, dy: Tensor) -> None:
        """Show it."""
        if layer.latest is not None:
            layer.latest(dy)

    def multiplied(self, part: Part, known: bool) -> None:
        """As `Products` says: a product that no kind tells of."""
        if part.w is None:
            return
        inside = self._running.innermost()
        owner = self._census.owner(part.w) if known else None
        module = None if inside is None else inside.layer.module
        if self._choice.uncompiled and (inside or owner) is not None:
            self._choice.refuse("it multiplies outside of known layers")
        # Its weight, or what it computed of it.
        own = tuple(part.w.shape) == weight_shape(module) if owner is None else owner.module is module
        if inside is not None and module is not None and own:
            inside.heard = True
            self._census.saw(module)
            self._outside.hears()
            kept = None if owner is None else self._census.kept(owner.module, owner.name)
            self._shown.use(inside.layer.name, inside.layer.observer, part, kept)
            return
        if owner is not None:
            self._outside.hears()
            self._shown.use(owner.site, owner.observer, part, self._census.saw(owner.module, owner.name))
