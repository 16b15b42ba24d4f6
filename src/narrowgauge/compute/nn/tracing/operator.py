"""A function of ours as an operator of torch's, which a compiler sees and does not look into.

As `torch.library.custom_op` makes them, without what that does around each call: it looks whether results share memory
with arguments, which takes longer than launching the kernels inside. So whoever writes an operator sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from narrowgauge.compute.nn.tracing.marks import not_compiled

Function = TypeVar("Function", bound=Callable[..., Any])
LIBRARY = torch.library.Library("narrowgauge", "FRAGMENT")
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_SHAPES: dict[Any, Callable[..., Any]] = {}


def operator(function: Callable[..., Any], name: str = "") -> Any:
    """Register `function`, which changes none of its arguments and returns new tensors, under its own name."""
    name = name or function.__name__
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, not_compiled(function), "CompositeExplicitAutograd")
    made = getattr(torch.ops.narrowgauge, name).default
    _FUNCTIONS[made] = function
    return made


def shapes_of(made: Any) -> Callable[[Function], Function]:
    """Tell the compiler by this function what `made` would return, of tensors that have shapes and no numbers."""

    def register(function: Function) -> Function:
        torch.library.register_fake(made, function, lib=LIBRARY)
        _SHAPES[made] = function
        return function

    return register


def derivative_of(made: Any, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Tell autograd what to do in the backward pass of `made`, and what to keep for it.

    A graph whose backward pass was traced calls a twin without it: asking in each call whether somebody might want to
    differentiate takes as long as all the rest of a dispatch.
    """
    torch.library.register_autograd(made, backward, setup_context=setup_context, lib=LIBRARY)
    twin = operator(_FUNCTIONS[made], f"{_FUNCTIONS[made].__name__}_traced")
    shapes_of(twin)(_SHAPES[made])

    def trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with mode:
            return twin(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(made, FunctionalTensorMode, trace, lib=LIBRARY)
