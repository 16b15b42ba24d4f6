"""CUDA graphs that torch.compile makes (`mode="reduce-overhead"`), left aside for a recorded step.

    a replay                            runs no Python: what a layer's operators do in it cannot be watched
    a function captured too often       is run by torch without its graph, kernel by kernel

So in a recorded step torch hears of every function that it was captured too often. The kernels are the same, and the
numbers; they take memory beside the pool that the graphs keep. Before its first graph torch captures an empty one, to
have that pool: no step of the program's is captured in it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_TREES, _COMPILER = "torch._inductor.cudagraph_trees", "torch._inductor.compile_fx"
_ASKED = "exceed_rerecord_limit"


@contextmanager
def launched(unheard: Callable[[], AbstractContextManager[object]] = nullcontext) -> Iterator[None]:
    """Meanwhile nothing that is compiled is captured, nor replayed; yields at once where there are no such graphs.

    `unheard()` is open while torch captures the empty graph.
    """
    manager = _manager()
    asked = getattr(manager, _ASKED, None)
    if asked is None:
        yield
        return

    def too_often(self: Any, node: Any, function: Any) -> bool:
        return True

    made = manager.__init__

    @functools.wraps(made)
    def quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        with unheard():
            made(self, *args, **kwargs)

    ours = {_ASKED: (asked, too_often), "__init__": (made, quietly)}
    for name, (_, instead) in ours.items():
        setattr(manager, name, instead)
    try:
        yield
    finally:
        for name, (original, instead) in ours.items():
            if getattr(manager, name) is instead:
                setattr(manager, name, original)


def _manager() -> Any:
    """torch's class, if this program may make such graphs. Loaded before it is needed, or its first call is missed."""
    if _COMPILER not in sys.modules and not torch.cuda.is_initialized():
        return None
    return getattr(importlib.import_module(_TREES), "CUDAGraphTreeManager", None)
