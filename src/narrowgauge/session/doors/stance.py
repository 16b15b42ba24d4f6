"""What torch.compile is told to do meanwhile, where the program may tell it something else at any time.

`torch.compiler.set_stance` gives back what it found. Of two that overlap, and do not lie one in the other, each gives
back what should be gone: the program's, or ours for good. So ours is taken back only where it stands; and where the
program puts it back when it is over, at the next look.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.session.doors.entries import nothing

FEW = 8  # of ours that a program may still put back
_COUNT = "set_fullgraph_compiled_frame_count"


def _frames() -> Any:
    return sys.modules.get("torch._dynamo.eval_frame")


def stance() -> str:
    """What it is told now."""
    return str(getattr(getattr(_frames(), "_stance", None), "stance", "default"))


def count_as_compiled() -> None:
    """A call that begins uncompiled is not refused when it returns, whatever is told then.

    torch counts what a call of `fullgraph=True` found compiled, if it asks for that, and refuses it for none.
    """
    count = getattr(_frames(), _COUNT, None)
    if count is not None and (found := count(-1)) >= 0:  # below, it does not ask
        count(found + 1)


class Uncompiled:
    """Between `begin` and `end` what is compiled runs uncompiled, unless the program says otherwise."""

    def __init__(self) -> None:
        self._ours: deque[tuple[Any, Any]] = deque(maxlen=FEW)  # each with what stood before it
        self._over = True

    def begin(self) -> None:
        """Run uncompiled from now on."""
        self.look()
        set_ = torch.compiler.set_stance("force_eager")
        self._ours.append((_frames()._stance, set_.prev))
        self._over = False

    def end(self) -> None:
        """As the program has it from now on."""
        self._over = True
        self.look()

    def look(self) -> None:
        """Take back what stands of ours and is over, also where one was begun in another."""
        while self._over and (standing := self._standing()) is not None:
            _frames()._set_stance(standing[1])

    def pause(self) -> Callable[[], None]:
        """As the program has it, until what is returned is called; then ours again if it is not over."""
        standing = None if self._over else self._standing()
        if standing is None:
            return nothing
        ours, before = standing
        _frames()._set_stance(before)

        def again() -> None:
            if not self._over and _frames()._stance is before:
                _frames()._set_stance(ours)

        return again

    def _standing(self) -> tuple[Any, Any] | None:
        """Ours that stands, and what stood before it; None if none does."""
        return next((pair for pair in self._ours if _frames()._stance is pair[0]), None)
