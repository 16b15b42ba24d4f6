"""Is a CUDA graph being captured? What runs then is repeated without this code, which must not decide for ever.

`torch.compile(mode="reduce-overhead")` runs a function once before it captures it, with memory of the graph's pool
already: what is kept from that run would stop the capture, so it counts as a part of it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def capturing(x: Tensor) -> bool:
    """Whether what happens to `x` now goes into a CUDA graph, or is a rehearsal for it."""
    return x.is_cuda and (torch.cuda.is_current_stream_capturing() or _rehearsing(x.device.index))


def _rehearsing(index: int | None) -> bool:
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        containers = trees.get_obj(trees.local, "tree_manager_containers")
        container = containers.get(torch.cuda.current_device() if index is None else index)
        return bool(container is not None and container.tree_manager is not None and container.tree_manager.in_warmup)
    except (AttributeError, AssertionError, RuntimeError):  # another torch, or a thread that never saw a graph
        return False
