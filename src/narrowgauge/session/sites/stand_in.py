"""What stands in the place of a function of torch's while a recorded step runs.

A program may keep one for good (`self.act = F.linear`, where a module is built in such a step). So it compares as
torch's own does, in tables too (`torch.overrides` makes its tables once), is pickled as torch's own, and once it stands
there no more only calls it, and holds nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pkgutil import resolve_name
from types import MethodType
from typing import Any

import torch

from narrowgauge.session.doors.scripted import same_to_torchscript
from narrowgauge.session.doors.unseen import unseen


class StandIn:
    """Stands for `original`, which is `name` in `owner`; calls go to `call(args, kwargs)`, if there is one."""

    __wrapped__: Callable[..., Any]

    def __init__(self, original: Callable[..., Any], owner: Any, name: str) -> None:
        functools.update_wrapper(self, original)
        inside = f"{owner.__module__}:{owner.__qualname__}." if isinstance(owner, type) else f"{owner.__name__}:"
        self._place = inside + name
        self.call: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
        same_to_torchscript(original, self)

    @unseen
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """As torch's own."""
        call = self.call
        if call is None or torch.compiler.is_dynamo_compiling():  # exported, say: nothing of ours is traced with it
            return self.__wrapped__(*args, **kwargs)
        return call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method, where torch's own is one: a builtin function in a class is none."""
        return MethodType(self, instance) if instance is not None and hasattr(self.__wrapped__, "__get__") else self

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == (other.__wrapped__ if isinstance(other, StandIn) else other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __reduce__(self) -> Any:
        return resolve_name, (self._place,)
