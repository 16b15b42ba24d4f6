"""What a kind of layer tells of one call: which tensors were multiplied, and how each of them lies as a matrix.

    y_MN = x_MK · w_NK       x contracted along its last axis K, w along its last axis K, the gradient dy_MN along N

A `Part` is one such product. Its tensors are the program's own; `x_rows`, `w_rows` and `dy_rows` turn one into rows,
and run only if the step is recorded. Weights of E experts become [E, N, K]: one scale each (`experts.py`). A layer that
quantizes by itself gives an `own`, which says how.

Legend: M = tokens, K = input features, N = output features, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.nn.operands import OperandRole
from narrowgauge.compute.quant import Granularity, Scaling
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import Format
from narrowgauge.metrics.site import WHOLE
from narrowgauge.session.sites.tensor_parallel import NONE, Copies
from narrowgauge.session.tensors.sharded import Held

Turn = Callable[[Tensor], Tensor]


class Rule(NamedTuple):
    """How a layer quantizes a tensor: by which rule, and with which scale if that was not made from the tensor."""

    operand: Operand
    given: Given | None = None


@lru_cache(256)
def operand(fmt: Format, granularity: Granularity, scaling: Scaling, margin: int = 0) -> Operand:
    """The same object for the same rule: what is prepared for it is found again."""
    return Operand(fmt, granularity, scaling, margin)


# A role and its tensor, as a matrix or not, to how the layer quantizes it; or the reason why it does not.
Own = Callable[[OperandRole, Tensor], Rule | str]


# The weight of a call that is one product, of its first argument and this as they are, and how the layer quantizes.
Product = tuple[Tensor, Own | None]

# What this rank has of a tensor, and how that is quantized.
ByHeld = Callable[[Held, Own | None], None]

# A tensor, what it is between its uses (weights), and who is told of it, now or as it is cast; False if it is not.
ByCast = Callable[[Tensor, Tensor | None, ByHeld], bool]


def rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


@dataclass(eq=False, slots=True)  # frozen, it would take four times as long to make
class Part:
    """One product of a layer's call.

    `suffix` goes behind the layer's name if it makes several; `holds` names the parameters of it that were multiplied.
    A tensor that cannot be had from outside is None, and `hidden` says which and why. `copies` tells of plain tensors
    that other ranks have as well. `by_cast` is asked of tensors that are spread over ranks, where `own` is not enough.
    """

    x: Tensor | None
    w: Tensor | None
    y: Tensor | None
    x_rows: Turn = rows
    w_rows: Turn = rows
    dy_rows: Turn = rows
    own: Own | None = None
    suffix: str = ""
    holds: tuple[str, ...] = ("weight",)
    hidden: str = ""
    copies: Copies = NONE
    by_cast: ByCast | None = None


def is_plain(part: Part) -> bool:
    """Whether both tensors are ordinary ones, of which this rank has all."""
    return type(part.x) is Tensor and type(part.w) is nn.Parameter and not part.hidden and part.copies == NONE


class Kind(Protocol):
    """An adapter: one kind of layer, known by its class.

    It may have `product(module, x)` too, the shorter way of `parts` where these are one `Product`, else None.
    """

    @property
    def whole(self) -> bool:
        """Whether `parts` tells of all that the layer multiplies; else products heard inside of it come first."""
        ...

    @property
    def in_graph(self) -> bool:
        """Whether its first argument and the gradient of its result say everything: a graph can tell of these."""
        ...

    def knows(self, module: nn.Module) -> bool:
        """Whether the module is of this kind."""
        ...

    def parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """What one call multiplied, in the order in which it did."""
        ...


def is_a(module: nn.Module, package: str, *names: str) -> bool:
    """Whether the module's class or one of its bases has one of these names and comes from `package`."""
    return base_of(module, package, *names) is not None


def base_of(module: nn.Module, package: str, *names: str) -> str | None:
    """Which of these names the module's class, or the first of its bases that comes from `package`, has; else None."""
    cls: Any = type(module)
    try:
        return _base_of(cls, package, names)
    except TypeError:  # a metaclass that says when classes are equal, and not how they are hashed
        return _base_of.__wrapped__(cls, package, names)


@lru_cache(512)
def _base_of(cls: Any, package: str, names: tuple[str, ...]) -> str | None:
    for base in cls.__mro__:
        if base.__name__ in names and (base.__module__ == package or base.__module__.startswith(f"{package}.")):
            return str(base.__name__)
    return None


def weight_of(module: nn.Module) -> Tensor | None:
    """A layer's weight. While a model runs, a wrapper may have put another tensor in the place of the parameter."""
    own = module._parameters.get("weight")
    own = vars(module).get("weight") if own is None else own
    return own if isinstance(own, Tensor) else None


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> Tensor | None:
    """The first positional argument, or the first of these keywords; None if it is no tensor."""
    value = args[0] if args else next((kwargs[name] for name in names if name in kwargs), None)
    return value if isinstance(value, Tensor) else None


def output_of(output: Any) -> Tensor | None:
    """The tensor that a layer returned, be it first of several."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    return first if isinstance(first, Tensor) else None


def named(prefix: str, module: str) -> str:
    """A module's name in the run; that of a model which is one layer is its prefix, if it has one.

    >>> named("Critic.", "layers.0"), named("Linear1.", ""), named("", "")
    ('Critic.layers.0', 'Linear1', '(model)')
    """
    if module in ("", WHOLE):
        return prefix.removesuffix(".") or WHOLE
    return prefix + module
