"""What TorchScript takes a function of ours for that stands in the place of a builtin of torch's.

It knows builtins by their identity, and would otherwise try to compile ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


def same_to_torchscript(builtin: Any, ours: Callable[..., Any]) -> None:
    """Have TorchScript take `ours` for `builtin`, as long as it lives."""
    known = torch.jit._builtins._find_builtin(builtin)
    if known is None:
        return
    torch.jit._builtins._register_builtin(ours, known)
    # By an address, at which another function may lie one day.
    forget = weakref.finalize(ours, torch.jit._builtins._get_builtin_table().pop, id(ours), None)
    forget.atexit = False
