"""CUDA graphs that torch.compile makes (`mode="reduce-overhead"`), left aside for a recorded step.

    a replay                            runs no Python: what a layer's operators do in it cannot be watched
    a function captured too often       is run by torch without its graph, kernel by kernel

So in a recorded step torch hears of every function that it was captured too often. The kernels are the same, and the
numbers; they take memory beside the pool that the graphs keep.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TREES, _COMPILER = "torch._inductor.cudagraph_trees", "torch._inductor.compile_fx"
_ASKED = "exceed_rerecord_limit"


@contextmanager
def launched() -> Iterator[None]:
    """Meanwhile nothing that is compiled is captured, nor replayed; yields at once where there are no such graphs."""
    manager = _manager()
    asked = getattr(manager, _ASKED, None)
    if asked is None:
        yield
        return

    def too_often(self: Any, node: Any, function: Any) -> bool:
        return True

    setattr(manager, _ASKED, too_often)
    try:
        yield
    finally:
        if getattr(manager, _ASKED) is too_often:
            setattr(manager, _ASKED, asked)


def _manager() -> Any:
    """torch's class, if this program may make such graphs. Loaded before it is needed, or its first call is missed."""
    if _COMPILER not in sys.modules and not torch.cuda.is_initialized():
        return None
    return getattr(importlib.import_module(_TREES), "CUDAGraphTreeManager", None)
