"""For tests on a GPU: whatever would wait for it raises an error, and the next test may wait again."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting(forbidden=True):
    """Raise RuntimeError for what waits for the GPU in this block, if that is `forbidden`."""
    if not forbidden:
        yield
        return
    with warnings.catch_warnings():
        # The first call of a process warns that torch does not see everything that waits. As an error, which pytest
        # makes of warnings, it would leave the mode on for all tests that follow.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
