"""Memory that a thread keeps from one tensor to the next, for passes on the CPU that write somewhere.

A fresh buffer of a megabyte comes from the kernel page by page, and faulting the pages in costs as much as the
arithmetic that fills them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = 64  # views that are kept
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float16, torch.uint8)

_kept = threading.local()


@dataclass(frozen=True)
class Scratch:
    """Matrices of one shape: three of float32, one of half precision, one of bytes."""

    a: Tensor
    b: Tensor
    c: Tensor
    half: Tensor
    byte: Tensor


def scratch(rows: int, columns: int) -> Scratch:
    """This thread's memory as matrices [rows, columns], to be used before the next call only."""
    size = rows * columns
    if size > getattr(_kept, "size", -1):
        _kept.size, _kept.views = size, {}
        _kept.buffers = tuple(torch.empty(size, dtype=dtype) for dtype in DTYPES)
    views: dict[tuple[int, int], Scratch] = _kept.views
    if (rows, columns) not in views:
        if len(views) >= SHAPES:
            views.clear()
        views[rows, columns] = Scratch(*(buffer[:size].view(rows, columns) for buffer in _kept.buffers))
    return views[rows, columns]
