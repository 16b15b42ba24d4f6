"""A layer tells of itself from inside a graph that torch.compile makes, without a break in it.

    show(x, handle, mark)      forward     x is the input of the layer that `handle` names
    gradient(dy, handle)       backward    dy is the gradient of its result

Both are operators that a compiler does not look into. It would drop one whose result nobody needs, so `show` claims to
change a mark, and what `gradient` returns is a gradient: that of a number which the layer's result pretends to be made
of. The pretence is a copy of the result, which a compiler leaves out.

Layers of one shape share a graph: what differs between them, handle and marks, are tensors that each of them owns.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from narrowgauge.compute.nn.tracing.handle import layer_of, new_handle
from narrowgauge.compute.nn.tracing.marks import exporting, not_compiled, passed_over
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.compute.nn.tracing.operator import LIBRARY
from narrowgauge.errors import ConversionError
from narrowgauge.session.doors import compilations
from narrowgauge.session.doors.leaving import SEAT


class Tells(Protocol):
    """Who is told: of a layer's input, of its gradient, and of its call where no graph is."""

    def input_in_graph(self, x: Tensor) -> None:
        """The layer is called with x."""

    def gradient_in_graph(self, dy: Tensor) -> None:
        """The gradient of its result arrived."""

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """It was called outside of graphs."""


class Seat(NamedTuple):
    """What a graph knows a layer by: its handle; a mark that is changed; a number [1] whose gradient is zero."""

    handle: Tensor
    mark: Tensor
    pretended: Tensor
    as_autocast: bool  # the layer casts its input as autocast says, on whichever device

    @classmethod
    def of(cls, layer: Tells, device: torch.device, as_autocast: bool) -> Seat:
        """A new one on a device, valid for as long as the layer is there."""
        pretended = torch.zeros(1, device=device, requires_grad=True)
        return cls(new_handle(layer, device), torch.zeros(1, device=device), pretended, as_autocast)


def _layer(handle: Tensor) -> Tells | None:
    try:
        layer: Tells = layer_of(handle)
    except ConversionError:  # it is gone, and so is whoever would be told
        return None
    return layer


def _show(x: Tensor, handle: Tensor, mark: Tensor) -> None:
    layer = _layer(handle)
    if layer is not None:
        unseen_by_modes(layer.input_in_graph, x)


def _gradient(dy: Tensor, handle: Tensor) -> Tensor:
    layer = _layer(handle)
    if layer is not None:
        unseen_by_modes(layer.gradient_in_graph, dy)
    return dy.new_zeros(1, dtype=torch.float32)


_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe
LIBRARY.define("show(Tensor x, Tensor handle, Tensor(a!) mark) -> ()", tags=_TAGS)
LIBRARY.impl("show", not_compiled(_show), "CompositeExplicitAutograd")
torch.library.register_fake("narrowgauge::show", lambda x, handle, mark: None, lib=LIBRARY)
LIBRARY.define("gradient(Tensor dy, Tensor handle) -> Tensor", tags=_TAGS)
LIBRARY.impl("gradient", not_compiled(_gradient), "CompositeExplicitAutograd")
torch.library.register_fake(
    "narrowgauge::gradient", lambda dy, handle: dy.new_empty(1, dtype=torch.float32), lib=LIBRARY
)
show, gradient = torch.ops.narrowgauge.show.default, torch.ops.narrowgauge.gradient.default


class _AtResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: Tensor, pretended: Tensor) -> Tensor:
        ctx.save_for_backward(handle)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, gradient(gradients[0], *ctx.saved_tensors)


def _at_result(y: Tensor, handle: Tensor, pretended: Tensor) -> Tensor:
    result: Tensor = _AtResult.apply(y, handle, pretended)  # type: ignore[no-untyped-call]
    return result


@functools.cache
def prepare() -> None:
    """To be called before a graph with such layers is made: it takes `_at_result` as it is, as one operation.

    Looked into, it would be a function of higher order, which torch's splitting of graphs under DDP refuses.
    """
    import torch._dynamo  # slow, and here it has been loaded long ago

    torch._dynamo.allow_in_graph(_at_result)


@functools.partial(passed_over, below=True)
def called(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> Any:
    """The hook of every layer that has a seat; behind its first branch it is traced, and the same for all of them.

    Without an output it is being taken away (see `LayerCalls.ended`).
    """
    if output is None:
        return None
    seat: Seat = getattr(module, SEAT)
    if not torch.compiler.is_compiling():
        layer = _layer(seat.handle)
        if layer is not None:
            layer.called(module, args, kwargs, output)
        return None
    if exporting() or compilations.as_ever:  # what leaves the program, or is a library's, has nothing of ours
        return None
    x = args[0] if args else kwargs["input"] if "input" in kwargs else next(iter(kwargs.values()))
    x = x.detach()
    if seat.as_autocast and torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    show(x, seat.handle, seat.mark)
    return _at_result(output, seat.handle, seat.pretended) if output.requires_grad else None
