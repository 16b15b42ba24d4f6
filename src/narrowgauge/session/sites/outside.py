"""Whether a recorded step of a program that compiles nothing is listened to for products outside of its layers.

To listen is to put functions of ours in the places of some twenty of torch's and to take them out again (`products`).
Python then looks through `Tensor` and its subclasses anew, and nothing of it is in the processor's caches: of a step of
some milliseconds that takes as much as counting some of its tensors does. So where there is nothing to be heard, it is
listened for only now and then:

    the first WARM steps       always; and again when a model is taken in
    something was heard        always: the program multiplies outside of its layers
    a weight was not seen      always, unless it is looked up (an embedding's): nobody knows what is done with it
    otherwise                  every SELDOM-th step

What can be missed is a product by a weight that a layer of its own multiplies as well, if the program first takes it
after the first steps: in SELDOM - 1 recorded steps at most, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable

WARM = 4
SELDOM = 8


class Outside:
    """Of one program.

    Args:
        lacks: whether a weight was not seen yet that could have been.
    """

    def __init__(self, lacks: Callable[[], bool]) -> None:
        self._lacks = lacks
        self._heard = self._late = False
        self._steps = 0  # in which something was multiplied
        self._all_seen: bool | None = None  # asked once, for it asks of every weight

    @property
    def notes(self) -> list[str]:
        """That one may be missing."""
        if not self._late:
            return []
        return [
            "Products outside of layers were heard for the first time when all weights had been seen, and only every "
            f"{SELDOM}th recorded step was listened to: of up to {SELDOM - 1} before that one, they may be missing."
        ]

    def begin_anew(self) -> None:
        """There is another model."""
        self._steps, self._all_seen = 0, None

    def expected(self) -> bool:
        """Whether the step that begins is listened to."""
        if self._heard or self._steps < WARM or self._steps % SELDOM == 0:
            return True
        if self._all_seen is None:
            self._all_seen = not self._lacks()
        return not self._all_seen

    def hears(self) -> None:
        """There was one."""
        self._late |= not self._heard and self._all_seen is True
        self._heard = True

    def ended(self, some: bool) -> None:
        """A step ended, in which something was multiplied or not."""
        self._steps += some
