"""Counts the calls of a library's function that run: what is heard inside of them means something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def counted(owner: Any, name: str) -> Make:
    """What makes a function raise `owner.name` by one while it runs, for `Seams.replace`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            setattr(owner, name, getattr(owner, name) + 1)
            try:
                return original(*args, **kwargs)
            finally:
                setattr(owner, name, getattr(owner, name) - 1)

        return run

    return make
