"""What stands between a program and a function of torch's is passed over by warnings, as the import system is.

    warnings.warn(..., stacklevel=2)    names the line that called; without this that would be a line of ours, and of
                                        warnings from many places Python would show one

Source: CPython, `warnings._is_internal_frame`, and the same in `logging`: both words in the file's name.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def unseen(function: F) -> F:
    """The same function, whose frames no `stacklevel` counts."""
    if isinstance(function, FunctionType):
        function.__code__ = _renamed(function.__code__)
        linecache.lazycache(function.__code__.co_filename, function.__globals__)  # who shows an error finds the lines
    return function


@cache  # a compiler's guards tell functions apart by their code: there is one, however often it is followed
def _renamed(code: CodeType) -> CodeType:
    return code.replace(co_filename=f"{code.co_filename} <unseen, as importlib._bootstrap>")
