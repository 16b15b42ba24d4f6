"""What a caller asks of a run, as the one kind that a reader goes on with; or a sentence that says what was expected.

name      "loss"
names     "loss", ["loss", "lr"], an array of them            each once, in this order
whole     3, 3.0, numpy.int64(3)
wholes    3, [1, 2], range(3), an array of them
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.errors import RunError, UsageError, nearest, there_are

MOST = 400  # characters that a message spends on what there is


def name(what: str, given: Any, like: str) -> str:
    """One name; `what` is the argument's, `like` an example."""
    if not isinstance(given, str):
        raise wrong(what, given, f"one name, such as {like!r}")
    return str(given)


def names(what: str, given: Any, like: str) -> list[str]:
    """One name, or several."""
    found = [given] if isinstance(given, str) else _several(given)
    if found is None:
        raise wrong(what, given, f"a name, such as {like!r}, or a list of names")
    return list(dict.fromkeys(name(f"one of {what}", each, like) for each in found))


def whole(what: str, given: Any, least: int = 0) -> int:
    """A whole number of at least `least`.

    >>> whole("rank", 3.0)
    3
    """
    number = _whole(given)
    if number is None or number < least:
        raise wrong(what, given, f"a whole number from {least} on")
    return number


def wholes(what: str, given: Any) -> list[int]:
    """One whole number, or several."""
    found = [given] if isinstance(given, str) or _whole(given) is not None else _several(given)
    if found is None:
        raise wrong(what, given, "a whole number, or several (a list, a range, an array)")
    return [whole(f"one of {what}", each) for each in found]


def one_of(what: str, given: Any, options: Sequence[str]) -> str:
    """One of these words."""
    if not isinstance(given, str):
        raise wrong(what, given, f"one of {', '.join(options)}")
    if given not in options:
        raise UsageError(f"there is no {what} {given!r}; {nearest(given, options)}")
    return str(given)


def values(given: Any) -> list[Any] | dict[str, Any]:
    """What takes the places of a query's parameters: in order, or by name; numpy's numbers as Python's."""
    if isinstance(given, Mapping):
        return {str(key): _plain(value) for key, value in given.items()}
    found = () if given is None else None if isinstance(given, str | bytes) else _several(given)
    if found is None:
        raise wrong("parameters", given, "a list of values, one for each ? of the query, or a dict for its $names")
    return [_plain(value) for value in found]


def unknown(path: Path, what: str, given: Any, known: Iterable[Any]) -> RunError:
    """An error about a name that a run does not have; it may have thousands of others, so not all are told."""
    there = [str(each) for each in sorted(known)]
    said = nearest(given, there) if isinstance(given, str) else f"{there_are(there)}."
    if len(said) >= MOST:
        said = f"{there_are(there, most=5)}."
    return RunError(f"{path} has no {what} {given!r}; {said if there else 'nothing was recorded.'}")


def wrong(what: str, given: Any, expected: str) -> UsageError:
    """An error about an argument of a wrong kind."""
    found = " ".join(reprlib.repr(given).split())
    return UsageError(f"{what} is {found} ({type(given).__name__}); expected {expected}.")


def _whole(given: Any) -> int | None:
    if isinstance(given, float | np.floating):
        return int(given) if float(given).is_integer() else None
    try:
        return None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return None


def _several(given: Any) -> list[Any] | None:
    try:
        return list(given)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
