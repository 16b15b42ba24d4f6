"""How a session hears a program: on one thread, never while a CUDA graph is captured, with no error of its own.

    thread   the one that trains; another takes its place only when it has ended. What else trains meanwhile is told
    backward on a GPU, torch runs it in threads of its own, for the one that called it and waits
    capture  what is launched while a graph is captured would be replayed with it, and asking an event would spoil it
    unreal   inside of torch.func's transforms (grad, vmap, jvp) a tensor stands for others; a fake one has no numbers;
             what is done to one while torch.jit or make_fx traces is done again whenever the traced graph runs
    modes    what the program has to see each operation of torch's, modes and classes of tensors, does not see ours
    errors   the program goes on; the run says what is missing

Two errors pass, because they must end the program: a conversion that was asked for and cannot be done, and the step
limit (a SystemExit).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.marks import not_compiled
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.errors import NarrowgaugeError

P = ParamSpec("P")
T = TypeVar("T")
_UNREAL = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


class Hearing:
    """Which thread is heard, and what failed."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ident = 0
        self._others = False
        self.waits = False  # the thread that trains has called `backward`, which has not returned
        self._deaf = 0  # above 0: what the program does now is no training
        self._failed: dict[str, int] = {}

    def mine(self) -> bool:
        """Whether the calling thread is the one that trains, or runs its backward pass for it.

        The first to ask is the one that trains, until it ends.
        """
        if self._deaf:
            return False
        if threading.get_ident() == self._ident:
            return True
        if inside_backward():  # says nothing of who trains: whoever called `backward` was asked about then
            return self.waits
        if self._thread is not None and self._thread.is_alive():
            self._others = True
            return False
        self._thread, self._ident = threading.current_thread(), threading.get_ident()
        return True

    @contextmanager
    def nothing(self) -> Iterator[None]:
        """Meanwhile nothing is heard, of any thread."""
        self._deaf += 1
        try:
            yield
        finally:
            self._deaf -= 1

    def perhaps_mine(self) -> bool:
        """The same, of what says nothing of training: it makes no thread the one."""
        return self._ident in (0, threading.get_ident())

    def failed(self, where: str, error: Exception) -> None:
        """Something of ours went wrong in `where`."""
        what = " ".join(f"{where}: {type(error).__name__}: {error}".split())[:300]
        self._failed[what] = self._failed.get(what, 0) + 1

    @property
    def notes(self) -> list[str]:
        """What was not heard, in words; empty if everything was."""
        found = [
            f"Following the program failed in {what} ({times} times); the program went on, and what was to be seen "
            "there is missing."
            for what, times in self._failed.items()
        ]
        if self._others:
            found.append("Several threads of the program train; only the first is followed.")
        return found


def heard(method: Callable[P, T]) -> Callable[P, T | None]:
    """A method of an object with a `hearing`: its errors are kept.

    Not run on another thread, in a capture, or where tensors are unreal.

    Where a compiled function leaves its graphs, what it calls is compiled by itself: this is not, nor what it calls.
    """

    @functools.wraps(method)
    def plainly(*args: P.args, **kwargs: P.kwargs) -> T | None:
        owner: Any = args[0]
        modes = torch._C._len_torch_dispatch_stack()
        if capturing() or unreal(modes) or not owner.hearing.mine():
            return None
        try:
            return unseen_by_modes(method, *args, **kwargs)
        except NarrowgaugeError:
            raise
        except Exception as error:
            owner.hearing.failed(method.__name__, error)
            return None

    uncompiled = not_compiled(plainly)

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        heard_by: Callable[P, T | None] = uncompiled if torch.compiler.is_compiling() else plainly
        return heard_by(*args, **kwargs)

    return run


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream; wakes no GPU."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def unreal(modes: int = 1) -> bool:
    """Whether tensors are none here that could be looked at later, or looking would be written into a graph.

    In a transform of torch.func; in a fake mode, or while make_fx traces (where `modes`, how many there are, is not 0);
    in torch.jit.trace.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or (modes > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _UNREAL))
        or torch._C._get_tracing_state() is not None
    )
