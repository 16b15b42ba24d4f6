"""Graphs that torch.compile makes for recorded steps, and keeps beside those of the other steps.

A graph is found by its guards. Whether modules have hooks is not among them, but which function modes are entered is:
under one of ours, which changes nothing, torch looks for another graph, makes it once, with the hooks that are there
then, and finds each of the two again. A mode is a thread's: so it is entered anew around each call, wherever that runs.

A backward pass is compiled with its forward, while it can still be given up; torch would wait for its first gradient.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from narrowgauge.compute.nn.tracing.marks import passed_over
from narrowgauge.session.doors.stance import stance
from narrowgauge.session.doors.unseen import unseen


class Recorded(TorchFunctionMode):
    """Does nothing. torch tells it from others by its class."""

    @passed_over  # outside of graphs it is called for each of torch's functions, and would be a graph for each
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


_here = threading.local()


@unseen
def run(compiled: Callable[..., Any], args: Any, kwargs: Any, failed: Callable[[Exception], None]) -> Any:
    """Call what is compiled, with its graphs of recorded steps; uncompiled if they cannot be made, which is told."""
    if getattr(_here, "runs", False) or stance() != "default":  # the program wants no graph, or no other one, now
        return compiled(*args, **kwargs)
    import torch._functorch.config as compiler  # slow, and loaded: something was compiled

    _prepare()
    _here.runs = True
    try:
        with compiler.patch(force_non_lazy_backward_lowering=True), Recorded():
            return compiled(*args, **kwargs)
    except torch._dynamo.exc.TorchDynamoException as error:
        failed(error)
    finally:
        _here.runs = False
    return uncompiled(compiled, args, kwargs)


@unseen
def uncompiled(compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call what is compiled as if it were not."""
    with torch.compiler.set_stance("force_eager"):
        return compiled(*args, **kwargs)


@functools.cache
def _prepare() -> None:
    """Each of the program's graphs may be there twice from now on, and still counts once."""
    import torch._dynamo.config as limits

    limits.recompile_limit *= 2
    limits.accumulated_recompile_limit *= 2


def compiling_seconds() -> float:
    """What torch has spent on making graphs in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    spent = getattr(dynamo, "compilation_time_metrics", {})
    return float(sum(sum(spent.get(part, ())) for part in ("_compile.compile_inner", "backward._backward_impl")))
