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

import inspect
import signal
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType
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
    >>> nearest("fwd", ["fprop", "dgrad", "wgrad"])
    'there are: dgrad, fprop, wgrad.'
    """
    known = sorted(options)
    # Users type any case; the names themselves may be upper or lower.
    by_fold = {name.casefold(): name for name in known}
    matches = get_close_matches(word.casefold(), by_fold, n=1, cutoff=0.55)
    return f"did you mean {by_fold[matches[0]]!r}?" if matches else f"{there_are(known)}."


def there_are(known: Sequence[str], most: int | None = None) -> str:
    """What there is, behind the verb that fits; of more than `most` so many, and the number of the others.

    >>> there_are(["head"]), there_are(["a", "b"]), there_are(["a", "b", "c"], 1)
    ('there is only: head', 'there are: a, b', 'there are: a and 2 more')
    """
    shown = list(known)[:most]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"{'there is only' if len(known) == 1 else 'there are'}: {', '.join(shown)}{more}"


def worded(error: BaseException) -> str:
    """Its class and what it says; a program's may fail as it says it, of which Python's traceback has these words.

    >>> worded(ValueError("the loader is empty")), worded(ValueError())
    ('ValueError: the loader is empty', 'ValueError')
    """
    try:
        text = str(error)
    except Exception:
        text = "<exception str() failed>"
    return f"{type(error).__name__}: {text}".rstrip(": ")


def in_one_line(error: BaseException) -> str:
    """The same words without line breaks, for a message that says something behind them.

    >>> in_one_line(ValueError("no such device:\\n  cuda:7"))
    'ValueError: no such device: cuda:7'
    """
    return " ".join(worded(error).split())


def let_pass(error: BaseException) -> None:
    """Raise it again if a signal handler of the program's raised it: a time limit, say, that ended while we worked."""
    trace = error.__traceback__
    while trace is not None:
        if _is_handler(trace.tb_frame):
            raise error
        trace = trace.tb_next


def _is_handler(frame: FrameType) -> bool:
    """Whether it runs a signal handler: one that is registered, or what got its arguments."""
    return frame.f_code in _registered() or _got_a_signal(frame)


def _registered() -> set[CodeType]:
    """The codes of those, for one may delete or reuse its arguments; not of decorators, whose codes others share."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        if callable(handler) and not inspect.isroutine(handler):
            handler = type(handler).__call__
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if isinstance(code, CodeType) and not hasattr(handler, "__wrapped__"):
            found.add(code)
    return found


def _got_a_signal(frame: FrameType) -> bool:
    """Whether it was given a signal's number and, interrupted by that, its caller's frame."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    values = [frame.f_locals.get(name) for name in names]
    given = [each for value in values for each in (value if type(value) is tuple else (value,))]
    return frame.f_back is not None and any(
        at is frame.f_back and isinstance(number, int) and number in signal.valid_signals()
        for number, at in pairwise(given)
    )
