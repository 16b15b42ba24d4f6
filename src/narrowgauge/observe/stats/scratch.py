"""Memory that a thread keeps from one tensor to the next, for passes on the CPU that write somewhere.

A fresh buffer of a megabyte comes from the kernel page by page, and faulting the pages in costs as much as the
arithmetic that fills them.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

SHAPES = 64  # views that are kept

_kept = threading.local()


def scratch(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three float32 matrices and a half-precision one [rows, columns], to be used before the next call only."""
    size = rows * columns
    if size > getattr(_kept, "size", -1):
        _kept.size, _kept.views = size, {}
        _kept.buffers = (*(torch.empty(size) for _ in range(3)), torch.empty(size, dtype=torch.float16))
    views: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = _kept.views
    if (rows, columns) not in views:
        if len(views) >= SHAPES:
            views.clear()
        a, b, c, half = (buffer[:size].view(rows, columns) for buffer in _kept.buffers)
        views[rows, columns] = (a, b, c, half)
    return views[rows, columns]
