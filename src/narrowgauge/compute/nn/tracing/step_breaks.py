"""A step of torch's own optimizers is heard between its graphs, where nothing of ours is traced.

    wrapper          calls the hooks, and may be compiled
      _use_grad      never is: torch calls it by itself, between two graphs
        graph_break  does nothing; called before the updates and behind them
        step         the updates

A hook that left its graph would do so in a loop. Torch then gives up on `wrapper`, whose code all optimizers share: it
compiles it for none, and refuses any of them under `fullgraph=True`. So where `wrapper` runs compiled it is
`graph_break` that tells: the function that it was, by which a compiler knows it, with code that asks who calls.

Source: torch 2.13, torch/optim/optimizer.py, `_use_grad_for_differentiable`, `Optimizer.profile_hook_step`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch.optim import optimizer as optimizers

from narrowgauge.compute.nn.tracing.marks import passed_over


def _inner(function: Any) -> CodeType | None:
    """The code of what `function` makes."""
    return next((code for code in function.__code__.co_consts if isinstance(code, CodeType)), None)


_WRAPPER, _USE_GRAD = _inner(optimizers.Optimizer.profile_hook_step), _inner(optimizers._use_grad_for_differentiable)
Tell = Callable[[Any, bool], None]
Between = Callable[[Any, Any, Any], bool]


class _OfThread(threading.local):
    def __init__(self) -> None:
        # Steps that run: whose, if it is told here, and the error that was being handled when it began.
        self.steps: list[tuple[FrameType, Any | None, BaseException | None]] = []


_here = _OfThread()
_original: list[tuple[FunctionType, CodeType]] = []  # the program may have put another in its place since
_asked = False
TELLS: list[tuple[Tell, Between]] = []


def hear(tell: Tell, between: Between) -> bool:
    """From now on call `tell(optimizer, ended)` twice for each such step; returns whether that can be.

    `between(optimizer, args, kwargs)`: whether it is told of here, and not by hooks.
    """
    global _asked
    dynamo: Any = sys.modules.get("torch._dynamo")
    breaks = getattr(dynamo, "graph_break", None)
    if not isinstance(breaks, FunctionType) or _WRAPPER is None or _USE_GRAD is None:
        return False
    if getattr(dynamo.config, "nested_graph_breaks", False):  # then whatever is outermost calls it
        return False
    if not _original:
        _original.append((breaks, breaks.__code__))
        breaks.__code__ = graph_break.__code__
    TELLS[:], _asked = [(tell, between)], True
    return True


def forget() -> None:
    """Tell nobody from now on."""
    TELLS.clear()
    if _original:
        breaks, code = _original.pop()
        breaks.__code__ = code


def asked() -> bool:
    """Whether any was ever to be heard."""
    return _asked


def makes(step: Any) -> bool:
    """Whether such a function is what makes this step."""
    return getattr(step, "__code__", None) is _USE_GRAD


def resumed() -> bool:
    """Whether what is left of `wrapper` behind a graph called the function that asks, and not `wrapper`."""
    return sys._getframe(2).f_code.co_name.startswith("torch_dynamo_resume_in_wrapper")


def graph_break(msg: str = "") -> None:
    """Force a graph break"""
    from narrowgauge.compute.nn.tracing.step_breaks import called  # its globals are those of torch's function

    called()


passed_over(graph_break, below=True)


def called() -> None:
    """`graph_break` was called, of whose code a graph has nothing."""
    frame, heard = sys._getframe(2), list(TELLS)  # who hears may come and go on another thread
    around = frame.f_back
    if frame.f_code is not _USE_GRAD or around is None or around.f_code is _WRAPPER or not heard:
        return  # the program's own; a step whose hooks tell
    if around.f_code.co_name != "wrapper" or around.f_code.co_filename != _USE_GRAD.co_filename:
        return
    steps, (tell, between) = _here.steps, heard[0]
    if not steps or steps[-1][0] is not frame:
        given = frame.f_locals
        optimizer = given["self"] if between(given["self"], given["args"], given["kwargs"]) else None
        steps.append((frame, optimizer, sys.exception()))
        if optimizer is not None:
            tell(optimizer, False)
        return
    _, optimizer, error = steps.pop()
    if optimizer is not None and sys.exception() is error:  # else the step raised
        tell(optimizer, True)
