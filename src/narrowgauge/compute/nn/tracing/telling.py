"""A compiled graph tells of what it does while it runs: an operator that calls back, and computes nothing.

    tell(handle, what, reads)       calls `callback(what, reads)`, for the callback that `handle` was made for

It claims to change the handle, so no compiler drops a call or turns two of the same handle round. It reads tensors:
what is written into them later in the graph is written after the call. What was written before may not be in its place:
a graph may write its inputs only when it ends.

A handle lies on the CPU: its number is read without waiting for a device, and no CUDA graph can swallow the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.nn.tracing.marks import not_compiled
from narrowgauge.compute.nn.tracing.operator import LIBRARY

Callback = Callable[[int, list[Tensor]], None]

_CALLBACKS: dict[int, Callback] = {}
_numbers = itertools.count()


def telling(callback: Callback) -> tuple[Tensor, Callable[[], None]]:
    """A handle, [1] int64, by which graphs call `callback`; and what lets go of it: from then on they tell nobody."""
    number = next(_numbers)
    _CALLBACKS[number] = callback

    def forget() -> None:  # perhaps while a graph is traced, where no tensor has a number
        _CALLBACKS.pop(number, None)

    return torch.tensor([number], device="cpu"), forget


def _tell(handle: Tensor, what: int, reads: list[Tensor]) -> None:
    callback = _CALLBACKS.get(int(handle))
    if callback is not None:
        callback(what, reads)


LIBRARY.define(
    "tell(Tensor(a!) handle, int what, Tensor[] reads) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)
LIBRARY.impl("tell", not_compiled(_tell), "CompositeExplicitAutograd")
torch.library.register_fake("narrowgauge::tell", lambda handle, what, reads: None, lib=LIBRARY)
tell: Any = torch.ops.narrowgauge.tell.default
