"""Marks for torch's compiler on functions of ours, without loading it: a second that most programs never need.

`torch.compiler.disable` and `torch.compiler.assume_constant_result` do the same, and import the compiler at once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

Function = TypeVar("Function", bound=Callable[..., Any])
_frames: Any = torch._C._dynamo.eval_frame
_PASSED_OVER: dict[int, CodeType] = {}  # by id: codes that are alike are equal


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, into which no compiler looks: `torch.compiler.disable`."""
    disabled: Callable[..., Any] = _disable_dynamo(function)
    return disabled


def passed_over(function: Function, *, below: bool = False) -> Function:
    """`function`, which is not compiled by itself; nor, if `below`, is what it calls. Only its code is marked.

    Where a compiled function leaves its graphs, torch compiles each Python function that is called by itself: a graph
    and a break more for each of ours. What is traced is another matter: there it is a part of what calls it. A program
    that has torch compile one by itself is to give it `inlined`.
    """
    if isinstance(function, FunctionType):
        action = _frames._FrameAction
        strategy = _frames._FrameExecStrategy(action.SKIP, action.SKIP if below else action.DEFAULT)
        _frames.set_code_exec_strategy(function.__code__, strategy)
        _PASSED_OVER[id(function.__code__)] = function.__code__
    return function


def inlined(function: Any) -> Any:
    """What torch's compiler is to be given for `function`: where that is passed over, one that it is a part of."""
    if id(getattr(function, "__code__", None)) not in _PASSED_OVER:
        return function
    from torch._dynamo.external_utils import wrap_inline  # as torch does with its own; loaded where somebody compiles

    return wrap_inline(function)


passed_over(torch.compiler.is_dynamo_compiling)  # which what is passed over asks


def constant(function: Function) -> Function:
    """What `function` answers while a graph is traced holds for the graph: `torch.compiler.assume_constant_result`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def exporting() -> bool:
    """Whether what is traced is to be exported. torch 2.11 and older trace its own question for it as True, always."""
    return bool(torch.compiler.is_exporting())
