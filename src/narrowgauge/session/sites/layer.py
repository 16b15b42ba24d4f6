"""A module of a known kind, and the hooks by which it tells of its calls: only in recorded steps it has any."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from narrowgauge.compute.nn.observer import Observer
from narrowgauge.session.doors.leaving import SEAT
from narrowgauge.session.sites import in_graph
from narrowgauge.session.sites.part import Kind, Part, Product
from narrowgauge.session.sites.used import Used

IN_GRAPH = (
    -1
)  # the number of the hook that is traced: guards know hooks by their numbers, and so it is the same for all


class Before(NamedTuple):
    """What is known of a call from one before: its kind's `product`, and what was used by it."""

    product: Callable[[nn.Module, Tensor], Product | None]
    used: Used


class HearsLayers(Protocol):
    """Who is told by a layer."""

    def begins(self, layer: Layer, module: nn.Module, args: tuple[Any, ...]) -> None:
        """It is called."""

    def ended(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """It returned, or raised an error: the output is None then."""

    def called(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """It was called outside of graphs, in a step that has graphs of its own."""

    def input_in_graph(self, layer: Layer, x: Tensor) -> None:
        """A graph calls it with x."""

    def gradient_in_graph(self, layer: Layer, dy: Tensor) -> None:
        """A graph's backward pass has the gradient of its result."""


class Layer:
    """A module of a known kind.

    Args:
        name: the module's.
        module: the program's, which may drop it.
        kind, observer: how it is looked at, and by whom.
        hears: told of its calls while it is hooked.

    Attributes:
        before: what is known of its call, once one was shown that was one `Product`.
        latest: shows the gradient of its latest call in a graph.
    """

    _numbers = itertools.count(2)

    def __init__(self, name: str, module: nn.Module, kind: Kind, observer: Observer, hears: HearsLayers) -> None:
        self.name, self.kind, self.observer, self._class = name, kind, observer, type(module)
        self._known, self._hears = ref(module), hears
        self._begins, self._ended = partial(hears.begins, self), partial(hears.ended, self)
        self._number = -next(Layer._numbers)  # torch's own hooks have none below zero
        self._seat: in_graph.Seat | None = None
        self.before: Before | None = None
        self.latest: Callable[[Tensor], None] | None = None

    @property
    def module(self) -> nn.Module | None:
        """The module; None once it is gone."""
        return self._known()

    @property
    def changed(self) -> bool:
        """Whether the module is of another class by now: torch's parametrizations change it."""
        module = self._known()
        return module is not None and type(module) is not self._class

    def is_still(self, module: nn.Module) -> bool:
        """Whether this is the module, and of the class that it had."""
        return module is self._known() and type(module) is self._class

    def becomes(self, kind: Kind, of: type[nn.Module]) -> None:
        """The module is `of` another class by now, and perhaps of another kind."""
        self.kind, self._class, self.before = kind, of, None

    def seen(self, module: nn.Module, part: Part, used: Used | None) -> None:
        """A call of it was shown, as one part: what the next one need not find out, if that was a `Product`."""
        product = getattr(self.kind, "product", None)
        if product is None or used is None or part.x is None or module is not self._known():
            return
        now = product(module, part.x)
        if now is not None and now[0] is part.w:
            self.before = Before(product, used)

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """It was called outside of graphs, in a step that has graphs of its own."""
        self._hears.called(self, module, args, kwargs, output)

    def input_in_graph(self, x: Tensor) -> None:
        """A graph calls it with x."""
        self._hears.input_in_graph(self, x)

    def gradient_in_graph(self, dy: Tensor) -> None:
        """The gradient of its result arrived."""
        self._hears.gradient_in_graph(self, dy)

    def hook(self) -> bool:
        """Be told of its calls; False if it is gone.

        As `register_forward_hook` does it, which takes ten times as long: there is a layer for every few tensors.
        First of all hooks that come after: a sharded weight is whole here, and perhaps not after them. What is said of
        a hook is said before it is there: a signal, or another thread, may call the module in between.
        """
        module, number = self._known(), self._number
        if module is None:
            return False
        module._forward_hooks_with_kwargs[number] = module._forward_hooks_always_called[number] = True
        module._forward_pre_hooks[number] = self._begins
        module._forward_hooks[number] = self._ended
        module._forward_hooks.move_to_end(number, last=False)  # type: ignore[attr-defined]
        return True

    def hook_in_graphs(self) -> bool:
        """Be told of its calls, also from inside of graphs that are made from now on; False if it is gone."""
        in_graph.prepare()
        module = self._known()
        if module is None:
            return False
        weight = next(module.parameters(recurse=False), None)
        device = torch.device("cpu") if weight is None else weight.device
        if self._seat is None or self._seat.handle.device != device:
            self._seat = in_graph.Seat.of(self, device, getattr(self.kind, "as_autocast", False))
        self._seat.pretended.grad = None
        vars(module)[SEAT] = self._seat
        module._forward_hooks_with_kwargs[IN_GRAPH] = True
        module._forward_hooks[IN_GRAPH] = in_graph.called
        module._forward_hooks.move_to_end(IN_GRAPH, last=False)  # type: ignore[attr-defined]
        return True

    def unhook(self) -> None:
        """Be told no more; twice is harmless."""
        module = self._known()
        if module is None:
            return
        number = IN_GRAPH if vars(module).pop(SEAT, None) is not None else self._number
        if module._forward_hooks.pop(number, None) is not None:
            module._forward_pre_hooks.pop(number, None)
            module._forward_hooks_with_kwargs.pop(number, None)
            module._forward_hooks_always_called.pop(number, None)
