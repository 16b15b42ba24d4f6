"""What is compiled: whose it is, how much of it there is, and who hears of its calls or has it run otherwise."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, Literal, Protocol
from weakref import ref

from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.session.doors.entries import Leave

_OPERATORS = "torch._higher_order_ops"  # cond, scan, map, ...
LIBRARIES = (_OPERATORS, "torch.nn.attention", "torchao.optim", "transformer_engine")  # modules, and what is in them

as_ever = False  # while such a function runs: layers do not tell from inside of its graphs

# Of a call: followed, and layers may be in it; without layers (a library's, an optimizer's step); heard of by nobody.
Whose = Literal["followed", "bare", "unheard"]


class HearsCompiled(Protocol):
    """Hears of what is compiled."""

    def compiled_begins(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function, or a module compiled in place, is called; returns what `compiled_ended` is to know."""

    def compiled_ended(self, known: Any, output: Any, *, left: bool) -> None:
        """The call returned, or was `left` by an error."""

    def update_begins(self, optimizer: Optimizer) -> Any:
        """An optimizer's step is called, without a closure."""

    def compiles(self) -> None:
        """Something is compiled, or about to be."""

    def learns(self) -> bool:
        """Whether what is called now is called with gradients, or will be."""
        ...


class HearsGraphs(Protocol):
    """Hears of calls that run compiled."""

    def compiled_runs(self, whose: Whose) -> Leave:
        """One begins; what is returned is called when it has ended."""
        ...

    def compiled_unheard(self, error: Exception) -> None:
        """Hearing of one failed."""


class Compilations:
    """What a program compiles: a recorded step asks for it, and has it run otherwise. This one's compiles nothing."""

    def any(self) -> bool:
        """Whether there is any."""
        return False

    def followed(self) -> bool:
        """Whether calls of any are followed."""
        return True

    def told(self) -> bool:
        """Whether who hears of graphs is told of each call that begins from now on."""
        return False

    def inside(self) -> bool:
        """Whether a call that is followed runs."""
        return False

    def eagerly(self) -> AbstractContextManager[object]:
        """Meanwhile it runs uncompiled."""
        return nullcontext()

    def in_graphs(self, failed: Callable[[Exception], None]) -> AbstractContextManager[object]:
        """Meanwhile it runs in graphs that are kept for recorded steps; `failed` is told why one cannot be made."""
        return nullcontext()


def of_a_library(function: Any) -> bool:
    """Whether it is a library's own function; a method (`optimizer.step`) is the program's, whose object it is."""
    return inspect.isfunction(function) and any(_lies_in(name, function) for name in LIBRARIES)


def must_compile(function: Any) -> bool:
    """Whether torch compiles it for itself because it means something else uncompiled.

    `torch.cond(p, f, g, x)` and its like are operators, whose gradients are those of what they are given. A weight that
    f reads is given to them by the compiler: it makes each tensor of f's closure an operand. Without it the weight has
    no gradient, and nothing says so.
    """
    return inspect.isfunction(function) and (
        _lies_in(_OPERATORS, function) or function.__name__ == "_flex_attention_hop_wrapper"
    )


def _lies_in(name: str, function: Any) -> bool:
    return f"{getattr(function, '__module__', '')}.".startswith(f"{name}.")


def optimizer_of(function: Any) -> ref[Optimizer] | None:
    """The optimizer whose step this is: a method of its, or what a learning rate scheduler has put in its place."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Optimizer):
        return ref(owner)
    if hasattr(function, "_wrapped_by_lr_sched"):
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        return next((found for found in held if isinstance(found, ref) and isinstance(found(), Optimizer)), None)
    return None


def called_by(function: Any) -> Any:
    """The module whose call this is, if `module.compile()` compiles it; else the function."""
    in_place = type(function) is MethodType and function.__func__ is nn.Module._call_impl
    return function.__self__ if in_place else function


def graphs() -> int:
    """How many have been compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # which we load as well
    return 0 if dynamo is None else int(dynamo.counters["stats"].get("unique_graphs", 0))
