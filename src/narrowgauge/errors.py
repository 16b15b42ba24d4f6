"""Every error narrowgauge raises on purpose, one root.

    NarrowgaugeError
    ├── UsageError        the command line or a call was used wrongly           exit code 2
    ├── FormatError       a number format was asked for something it has not
    ├── RecipeError       an unknown or inconsistent recipe
    ├── ConversionError   a model could not be converted as asked
    ├── ShapeError        shapes that do not fit each other
    ├── RunError          a run folder that can't be read or written
    └── ScriptError       the training script ended without anything to judge

What is worth telling but does not stop the work is a NarrowgaugeWarning.
A message says what was found, what was expected and what to do next.
"""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Iterable
from difflib import get_close_matches
from types import CodeType
from typing import Any


class NarrowgaugeError(Exception):
    """Root of all errors raised on purpose; `except NarrowgaugeError` catches them and nothing else."""


class UsageError(NarrowgaugeError):
    """A command or a call was used wrongly."""


class FormatError(NarrowgaugeError):
    """A number format was asked for something that it does not have."""


class RecipeError(NarrowgaugeError):
    """A recipe is unknown or contradicts itself."""


class ConversionError(NarrowgaugeError):
    """A model could not be converted as asked."""


class ShapeError(NarrowgaugeError):
    """Shapes do not fit each other."""


class RunError(NarrowgaugeError):
    """A run folder could not be read or written."""


class ScriptError(NarrowgaugeError):
    """A training script ended without anything that could be judged."""


class NarrowgaugeWarning(UserWarning):
    """Something a user should know that does not stop the work."""


def nearest(word: str, options: Iterable[str]) -> str:
    """The end of an error message about an unknown word: the nearest match, or everything there is.

    >>> nearest("curent", ["current", "delayed"])
    "did you mean 'current'?"
    """
    known = sorted(options)
    # Users type any case; the names themselves may be upper or lower.
    by_fold = {name.casefold(): name for name in known}
    matches = get_close_matches(word.casefold(), by_fold, n=1, cutoff=0.5)
    return f"did you mean {by_fold[matches[0]]!r}?" if matches else f"there is: {', '.join(known)}."


def let_pass(error: BaseException) -> None:
    """Raise it again if a signal handler of the program's raised it: a time limit, say, that ended while we worked."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            raise error
        trace = trace.tb_next


def _code(handler: Any) -> CodeType | None:
    """What a frame of it runs: of a function, a method, a partial, an object that is called; not its decorator's."""
    try:
        handler = handler.func if isinstance(handler, functools.partial) else handler
        called = (vars(kind).get("__call__") for kind in type(handler).__mro__)
        for each in (inspect.unwrap(getattr(handler, "__func__", handler)), *called):
            if isinstance(code := getattr(each, "__code__", None), CodeType):
                return code
    except Exception:  # an object of the program's that answers no question
        return None
    return None
