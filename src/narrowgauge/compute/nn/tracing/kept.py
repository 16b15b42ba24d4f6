"""What runs without gradients now, and is differentiated nevertheless: a reentrant checkpoint's first forward.

torch's is an autograd function, and libraries that have their own write it like torch's: `forward(ctx, ...)` runs the
layers without gradients, and the backward pass runs them again. An evaluation runs inside of no such function.
"""

from __future__ import annotations

import sys

from torch.autograd.function import FunctionCtx

_OTHERS = ("narrowgauge.", "torch._")  # our own functions, and those that compiled graphs and operators are made of


def kept_for_backward() -> bool:
    """Whether an autograd function's forward has called what runs now. Looks at every caller: ask seldom."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_name != "forward" or not code.co_argcount or code.co_varnames[0] == "self":
            continue
        if str(frame.f_globals.get("__name__")).startswith(_OTHERS):
            continue
        if isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
            return True
    return False
