"""Tells of each call of what torch has compiled, whoever had it compiled and when: also before there was a session.

Whatever compiles a function holds a list of hooks, which torch reads at each of its calls: what it calls before,
returns what it calls behind. Between `open` and `close` each of these lists is read with one of ours behind its own.
Nothing is traced there, and no guard asks for it: the function's graphs stay as they are.

Source: torch 2.13, torch/_dynamo/eval_frame.py, `_TorchDynamoContext.enter_exit_hooks`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from narrowgauge.compute.nn.tracing.marks import passed_over

_MODULE, _CLASS, _HOOKS = "torch._dynamo.eval_frame", "_TorchDynamoContext", "enter_exit_hooks"
_REFUSES = "get_skip_reasons"  # what torch calls, and only then, when it refuses a call that has returned
Leave = Callable[[], None]


class Entries:
    """Tells of such calls, and of each that it ends: with an error of the program's, or of torch's, which calls nothing
    behind a call that it refuses once it has returned (`fullgraph=True`, and no graph).

    Args:
        entered: called before each; returns what is called behind it, `nothing` if nothing is to be.
        failed: told of an error of ours; none reaches the program.
    """

    def __init__(self, entered: Callable[[], Leave], failed: Callable[[Exception], None]) -> None:
        self._entered, self._failed = entered, failed
        self._calls: dict[int, Leave] = {}  # those of all threads, by their frames: one that runs keeps its number
        self._outer: CodeType | None = None  # of torch's class
        self._code: CodeType | None = None  # in it, that they run in
        self._door = _Door(self._enter)
        self._asks: tuple[Any, Any] | None = None  # what torch asked for its reasons, and what it asks now

    def open(self) -> bool:
        """Tell from now on; False if this torch does not, or has no compiler loaded yet."""
        contexts = _contexts()
        outer = None if contexts is None else contexts.__call__.__code__
        if outer is not self._outer:
            self._outer, self._code = outer, None if outer is None else _reading(outer)
        if self._code is None:
            return False
        if vars(contexts).get(_HOOKS) is not self._door:
            setattr(contexts, _HOOKS, self._door)
        if self._asks is None and _REFUSES in self._code.co_names:
            self._hear_refusals(sys.modules[_MODULE])
        return True

    def close(self) -> None:
        """Tell no more."""
        contexts = _contexts()
        if contexts is not None and vars(contexts).get(_HOOKS) is self._door:
            delattr(contexts, _HOOKS)
        if self._asks is not None and getattr(sys.modules.get(_MODULE), _REFUSES, None) is self._asks[1]:
            setattr(sys.modules[_MODULE], _REFUSES, self._asks[0])
            self._asks = None

    def settle(self) -> None:
        """Calls that an error has left without a word, on whichever thread, are over: told now, and that it is late."""
        calls = list(self._calls.items())
        running = self._running() if calls else ()
        for frame, left in calls:
            if frame not in running and self._calls.get(frame) is left:
                self._leave(frame, left)
                self._failed(RuntimeError("torch did not tell that it ended"))

    def _hear_refusals(self, module: Any) -> None:
        reasons = getattr(module, _REFUSES)

        @functools.wraps(reasons)
        def asked() -> Any:
            frame = id(sys._getframe(1))
            if (left := self._calls.get(frame)) is not None:
                self._leave(frame, left)
            return reasons()

        self._asks = reasons, asked
        setattr(module, _REFUSES, asked)

    def _enter(self) -> Leave:
        within: FrameType | None = sys._getframe(1)
        while within is not None and within.f_code is not self._code:
            within = within.f_back
        frame = id(within)
        if (before := self._calls.get(frame)) is not None:  # its frame is gone: this one has its number
            self._leave(frame, before)
        try:
            left = self._entered()
        except Exception as error:
            self._failed(error)
            return nothing
        if left is nothing:
            return nothing
        self._calls[frame] = left
        return functools.partial(self._leave, frame, left)

    def _leave(self, frame: int, left: Leave) -> None:
        if self._calls.get(frame) is not left:
            return
        del self._calls[frame]
        try:
            left()
        except Exception as error:
            self._failed(error)

    def _running(self) -> set[int]:
        """The frames of all such calls, of all threads."""
        found = set()
        for frame in sys._current_frames().values():
            within: FrameType | None = frame
            while within is not None:
                if within.f_code is self._code:
                    found.add(id(within))
                within = within.f_back
        return found


class _Door:
    """Stands in torch's class, and so before the lists of its instances."""

    def __init__(self, enter: Callable[[], Leave]) -> None:
        self._enter = enter

    def __get__(self, context: Any, kind: type[Any]) -> Any:
        return self if context is None else _WithOurs(vars(context)[_HOOKS], self._enter)

    @passed_over
    def __set__(self, context: Any, hooks: Any) -> None:
        vars(context)[_HOOKS] = hooks


class _WithOurs:
    """A list, read with one more at its end; whatever else is done to it is done to the list."""

    def __init__(self, own: list[Any], ours: Any) -> None:
        self._own, self._ours = own, ours

    def __iter__(self) -> Iterator[Any]:
        yield from self._own
        yield self._ours

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _contexts() -> Any:
    """torch's class; None where its compiler is not loaded."""
    return getattr(sys.modules.get(_MODULE), _CLASS, None)


def _reading(code: CodeType) -> CodeType | None:
    """What runs while such a call does; None if it reads no hooks."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return next((each for each in inner if _HOOKS in each.co_names), None)


def nothing() -> None:
    """Nothing is to be done."""
