"""Modules and functions that a program has graphed: in recorded steps they are called as they were.

    make_graphed_callables(module, x)     module.forward is a replay from then on, of a forward and a backward graph
    a recorded step                       calls the forward from before, whose layers tell what they multiply
    other steps                           replay, as without us

While they are made nothing is heard: warm-ups are no training. torch refuses modules that have hooks, so ours are off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

from torch import nn

from narrowgauge.session.doors.hearing import Hearing
from narrowgauge.session.doors.unseen import unseen
from narrowgauge.session.steps.steps import Steps


class Graphed:
    """Those of one program.

    Args:
        steps, hearing: the session's.
        unhooked: while it is open, no model has a hook of ours.
    """

    def __init__(self, steps: Steps, hearing: Hearing, unhooked: Callable[[], AbstractContextManager[object]]) -> None:
        self._steps, self._hearing, self._unhooked = steps, hearing, unhooked
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._ended = False

    def make(self, callables: Any, make: Callable[[], Any]) -> Any:
        """What the program gets for its callables."""
        if not self._hearing.perhaps_mine():
            return make()
        given = callables if isinstance(callables, tuple) else (callables,)
        before = [getattr(each, "forward", None) if isinstance(each, nn.Module) else each for each in given]
        self._steps.capture_begins()
        with self._hearing.nothing(), self._unhooked():
            made = make()
        got = made if isinstance(made, tuple) else (made,)
        if len(got) != len(given):
            return made
        ours = tuple(self._followed(old, new) for old, new in zip(before, got, strict=True))
        return ours if isinstance(made, tuple) else ours[0]

    def leave(self) -> None:
        """From now on all of them are replays."""
        self._ended = True
        for module in self._modules:
            replay = getattr(vars(module).get("forward"), "replay", None)
            if replay is not None:
                module.forward = replay
        self._modules.clear()

    def _followed(self, old: Any, new: Any) -> Any:
        if not isinstance(new, nn.Module):
            return self._either(old, new) if callable(old) and callable(new) else new
        replay = vars(new).get("forward")
        if replay is not None and old is not None:
            new.forward = self._either(old, replay)
            self._modules.add(new)
        return new

    def _either(self, old: Callable[..., Any], replay: Callable[..., Any]) -> Callable[..., Any]:
        @unseen
        @functools.wraps(replay)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (old if self._recording() else replay)(*args, **kwargs)

        call.replay = replay  # type: ignore[attr-defined]
        return call

    def _recording(self) -> bool:
        line = self._steps.line
        return not self._ended and line is not None and line.recorded and not self._steps.made
