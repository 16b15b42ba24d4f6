"""A function under a name of its own: torch.compile keeps graphs by code object, and variants share their source."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with a code object of its own, called `name` but for what no name may have.

    >>> own_code(lambda x: x + 1, "step of fp8")(1), own_code(lambda: 0, "step of fp8").__code__.co_name
    (2, 'step_of_fp8')
    """
    source: Any = function
    code = source.__code__.replace(co_name="".join(letter if letter.isalnum() else "_" for letter in name))
    return types.FunctionType(code, source.__globals__, name, source.__defaults__, source.__closure__)
