"""Calls of modules as the interpreter has them: which is running on this thread, and how it was left."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

CALLING = nn.Module._call_impl.__code__


def innermost_call() -> FrameType | None:
    """The nearest call of a module on this thread; None outside of any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CALLING:
        frame = frame.f_back
    return frame


def left_by_an_error(call: FrameType) -> bool:
    """Whether the error that is being handled came out of this call, not of one around it."""
    error = sys.exception()
    trace = None if error is None else error.__traceback__
    return trace is not None and call in (trace.tb_frame, trace.tb_frame.f_back)


def still_runs(call: FrameType) -> bool:
    """Whether a call on this thread has not returned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call


def call_of(module: nn.Module, within: int = 0) -> FrameType | None:
    """The nearest call of this module on this thread that has so many more of it `within`; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CALLING and frame.f_locals.get("self") is module:
            if not within:
                return frame
            within -= 1
        frame = frame.f_back
    return None
