"""Weights that are trained and multiplied, and the gradient of what they make never comes by.

So it is inside of a program's own `torch.autograd.Function`, whose backward multiplies by itself: autograd hands the
gradient to that function, and torch's products in it have gradients off. A forward that is computed again in backward
(a checkpoint's) has its gradient then; of a weight that is not trained, and where the program has gradients off itself
(a teacher, a target network), none is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from torch import Tensor
from torch.autograd import Function

NAMED = 3
_APPLIES = Function.apply.__func__.__code__  # type: ignore[attr-defined]


class Ungraded:
    """Knows them by layer, over all recorded steps."""

    def __init__(self) -> None:
        self._without: dict[tuple[int, str], str] = {}  # by observer and name, its name in the run
        self._graded: set[tuple[int, str]] = set()

    def multiplied(self, key: tuple[int, str], name: str, w: Tensor) -> None:
        """A product of a training forward, without gradients."""
        if key not in self._without and w.requires_grad and _in_a_function():
            self._without.setdefault(key, name)

    def arrived(self, heard: Iterable[tuple[int, str, str]]) -> None:
        """What came in a step, by observer, name and role."""
        self._graded.update((observer, name) for observer, name, role in heard if role == "grad_output")

    @property
    def names(self) -> list[str]:
        """The layers of which no gradient came."""
        return sorted(name for key, name in self._without.items() if key not in self._graded)

    @property
    def notes(self) -> list[str]:
        """That, in a sentence."""
        names = self.names
        if not names:
            return []
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return [
            f"Gradients not seen: {', '.join(names[:NAMED])}{more}. The program multiplies there with gradients off, "
            "in an autograd function of its own, say: input and weight have rows, grad_output has none."
        ]


def _in_a_function() -> bool:
    """Whether this thread is in an autograd function's forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLIES:
        frame = frame.f_back
    return frame is not None
