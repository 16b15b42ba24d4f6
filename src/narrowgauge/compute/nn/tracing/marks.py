"""Marks for torch's compiler on functions of ours, without loading it: a second that most programs never need.

`torch.compiler.disable` and `torch.compiler.assume_constant_result` do the same, and import the compiler at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, into which no compiler looks: `torch.compiler.disable`."""
    disabled: Callable[..., Any] = _disable_dynamo(function)
    return disabled


def constant(function: Function) -> Function:
    """What `function` answers while a graph is traced holds for the graph: `torch.compiler.assume_constant_result`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def exporting() -> bool:
    """Whether what is traced is to be exported. torch 2.11 and older trace its own question for it as True, always."""
    return bool(torch.compiler.is_exporting())
