"""How a session hears a program: on one thread, never while a CUDA graph is captured, with no error of its own.

    thread   the one that trains (`threads`)
    capture  what is launched while a graph is captured would be replayed with it, and asking an event would spoil it
    unreal   inside of torch.func's transforms (grad, vmap, jvp) a tensor stands for others; a fake one has no numbers;
             what is done to one while torch.jit or make_fx traces is done again whenever the traced graph runs
    stage    of a pipeline: whose forward is running
    modes    what the program has to see each operation of torch's, modes and classes of tensors, does not see ours
    errors   the program goes on; the run says what is missing

Two errors pass, because they must end the program: a conversion that was asked for and cannot be done, and the step
limit (a SystemExit).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from narrowgauge.compute.nn.scaling.clock import NO_TASK, backward_task
from narrowgauge.compute.nn.tracing.marks import not_compiled, passed_over
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.errors import NarrowgaugeError, let_pass, worded
from narrowgauge.session.doors.threads import Threads

P = ParamSpec("P")
T = TypeVar("T")
_cuda, _ident, _compiling = torch.cuda, threading.get_ident, torch.compiler.is_dynamo_compiling
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_tracing, _NoFunctionModes = torch._C._is_tracing, torch._C.DisableTorchFunction
_captures = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)  # as `capturing` asks, in one function
_UNREAL = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


class Hearing(Threads):
    """Which thread is heard, and what failed, which `told` is told of."""

    def __init__(self, told: Callable[[str], None] = lambda what: None) -> None:
        super().__init__()
        self._told = told
        self._failed: dict[str, int] = {}
        self.stage: int | None = None  # of torch's pipelines, whose forward is running

    def plainly(self) -> bool:
        """Whether the thread that is followed calls outside of its backward passes, and `heard` would let it through.

        As nearly always. If not, what is asked about was no usual call, and is told of by the long way.
        """
        if self.ident != _ident() or self.deaf or _modes() or _transforms() or _tracing():
            return False
        return backward_task() == NO_TASK and not (_cuda._initialized and _captures())

    def failed(self, where: str, error: Exception) -> None:
        """Something of ours went wrong in `where`."""
        let_pass(error)
        what = " ".join(f"{where}: {worded(error)}".split())[:300]
        self._failed[what] = self._failed.get(what, 0) + 1
        self._told(f"following the program failed in {what}")

    def kept(self, where: str, error: Exception) -> None:
        """The same of one that is being handled; raises what must end the program."""
        if isinstance(error, NarrowgaugeError):
            raise
        self.failed(where, error)

    @property
    def notes(self) -> list[str]:
        """What was not heard, in words; empty if everything was."""
        found = [
            f"Following the program failed in {what} ({times} time{'s' * (times > 1)}); the program went on, and what "
            "was to be seen there is missing."
            for what, times in self._failed.items()
        ]
        if self.others:
            found.append("Several threads of the program train; only the first is followed.")
        return found


def heard(
    method: Callable[P, T],
    same: Callable[..., bool | None] | None = None,
    steps: bool = False,
    aside: Callable[..., object] | None = None,
) -> Callable[P, T | None]:
    """A method of an object with a `hearing`: its errors are kept.

    Not run on another thread, in a capture, or where tensors are unreal. A method that tells of training has another
    thread followed if `same`, called as the method is, says that it goes on with what is trained; `steps` is whether
    the method tells of an optimizer's step. On another thread `aside` is called as the method is, if there is one.

    Where a compiled function leaves its graphs, what it calls is compiled by itself: this is not, nor what it calls.
    """

    @functools.wraps(method)
    def carefully(*args: P.args, **kwargs: P.kwargs) -> T | None:
        owner: Any = args[0]
        if capturing() or unreal():
            return None
        hearing: Hearing = owner.hearing
        try:
            if not hearing.mine() and not (same and unseen_by_modes(_goes_on, hearing, same, steps, args, kwargs)):
                if aside is not None:
                    aside(*args, **kwargs)
                return None
            return unseen_by_modes(method, *args, **kwargs)
        except Exception as error:
            hearing.kept(method.__name__, error)
            return None

    uncompiled = not_compiled(carefully)

    # The usual case takes the shortest way: between the program's own operations nothing of this is in the processor's
    # cache, and each function or name that is looked up costs microseconds.
    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if _compiling():
            found: T | None = uncompiled(*args, **kwargs)
            return found
        owner: Any = args[0]
        hearing: Hearing = owner.hearing
        mine = hearing.ident == _ident() and not hearing.deaf
        if not mine or _modes() or _transforms() or _tracing() or (_cuda._initialized and capturing()):
            return carefully(*args, **kwargs)
        try:
            with _NoFunctionModes():
                return method(*args, **kwargs)
        except Exception as error:
            hearing.kept(method.__name__, error)
            return None

    return passed_over(run, below=True)


def heard_if(
    same: Callable[..., bool | None] | None = None,
    *,
    steps: bool = False,
    aside: Callable[..., object] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """As `heard`, with more to say than the method."""
    return functools.partial(heard, same=same, steps=steps, aside=aside)


def _goes_on(hearing: Hearing, same: Callable[..., bool | None], steps: bool, args: Any, kwargs: Any) -> bool:
    return hearing.goes_on(lambda: same(*args, **kwargs), steps)


@functools.partial(passed_over, below=True)
def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream; wakes no GPU."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@functools.partial(passed_over, below=True)
def unreal() -> bool:
    """Whether tensors are none here that could be looked at later, or looking would be written into a graph.

    In a transform of torch.func; in a fake mode, or while make_fx traces; in torch.jit.trace.
    """
    return (
        _transforms()
        or (_modes() > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _UNREAL))
        or _tracing()
    )
