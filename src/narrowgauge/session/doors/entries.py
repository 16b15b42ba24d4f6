"""Tells of each call of what torch has compiled, whoever had it compiled and when: also before there was a session.

Whatever compiles a function holds a list of hooks, which torch reads at each of its calls: what it calls before,
returns what it calls behind. Between `open` and `close` each of these lists is read with one of ours behind its own.
Nothing is traced there, and no guard asks for it: the function's graphs stay as they are.

Source: torch 2.13, torch/_dynamo/eval_frame.py, `_TorchDynamoContext.enter_exit_hooks`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

_MODULE, _CLASS, _HOOKS = "torch._dynamo.eval_frame", "_TorchDynamoContext", "enter_exit_hooks"
Leave = Callable[[], None]


class _Running(threading.local):
    """The calling thread's calls."""

    def __init__(self) -> None:
        self.calls: list[Leave] = []


class Entries:
    """Tells of such calls.

    Args:
        entered: called before each; returns what is called behind it.
        failed: told of an error of ours; none reaches the program.
    """

    def __init__(self, entered: Callable[[], Leave], failed: Callable[[Exception], None]) -> None:
        self._entered, self._failed = entered, failed
        self._running = _Running()
        self._door = _Door(self._enter)

    def open(self) -> bool:
        """Tell from now on; False if this torch does not, or has no compiler loaded yet."""
        if _call() is None:
            return False
        setattr(_contexts(), _HOOKS, self._door)
        return True

    def close(self) -> None:
        """Tell no more."""
        contexts = _contexts()
        if contexts is not None and vars(contexts).get(_HOOKS) is self._door:
            delattr(contexts, _HOOKS)

    def settle(self) -> None:
        """Calls of this thread that an error has left without a word are over.

        torch calls nothing behind a call that it refuses once it has returned (`fullgraph=True`, and no graph).
        """
        if self._running.calls and not _runs():
            while self._running.calls:
                self._leave(self._running.calls[-1])

    def _enter(self) -> Leave:
        try:
            left = self._entered()
        except Exception as error:
            self._failed(error)
            return _nothing
        self._running.calls.append(left)
        return functools.partial(self._leave, left)

    def _leave(self, left: Leave) -> None:
        if left not in self._running.calls:
            return
        self._running.calls.remove(left)
        try:
            left()
        except Exception as error:
            self._failed(error)


class _Door:
    """Stands in torch's class, and so before the lists of its instances."""

    def __init__(self, enter: Callable[[], Leave]) -> None:
        self._enter = enter

    def __get__(self, context: Any, kind: type[Any]) -> Any:
        return self if context is None else _WithOurs(vars(context)[_HOOKS], self._enter)

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


def _call() -> CodeType | None:
    """What runs while such a call does; None if it reads no hooks."""
    contexts = _contexts()
    return None if contexts is None else _reading(contexts.__call__.__code__)


@functools.cache
def _reading(code: CodeType) -> CodeType | None:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return next((each for each in inner if _HOOKS in each.co_names), None)


def _runs() -> bool:
    """Whether this thread is in such a call."""
    frame, call = sys._getframe(1), _call()
    while frame is not None and frame.f_code is not call:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _nothing() -> None:
    """Nothing is to be done."""
