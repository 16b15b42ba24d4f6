"""Whether a recorded step of a program that compiles nothing is listened to for products outside of its layers.

To listen is to put functions of ours in the places of some twenty of torch's and to take them out again (`products`).
Python then looks through `Tensor` and its subclasses anew, and nothing of it is in the processor's caches: of a step of
some milliseconds that takes as much as counting some of its tensors does. So where there is nothing to be heard, it is
listened for only now and then:

    the first WARM steps       always; and again when a model is taken in, or an optimizer gets parameters
    something was heard        always: the program multiplies outside of its layers
    a weight was not seen      always, unless it is looked up (an embedding's): nobody knows what is done with it
    otherwise                  a step of NEAR to FAR, by chance: never in step with what a program does by turns

What can be missed is a product by a weight that a layer of its own multiplies as well, or that is looked up, if the
program first takes it after the first steps: in FAR - 1 recorded steps at most where it takes it in each, in some of
its occurrences where it does not. A note says so once it is heard.
"""

from __future__ import annotations

import random
from collections.abc import Callable

WARM = 4
NEAR, FAR = 4, 12


class Outside:
    """Of one program.

    Args:
        lacks: whether a weight was not seen yet that could have been.
    """

    def __init__(self, lacks: Callable[[], bool]) -> None:
        self._lacks = lacks
        self._chance = random.Random(0)  # its own: the program's numbers stay as they are
        self._heard = False
        self._passed = self._missed = 0  # steps that were not listened to; those before the first product
        self.begin_anew()

    @property
    def notes(self) -> list[str]:
        """That some may be missing."""
        if not self._missed:
            return []
        steps = f"{self._missed} recorded step" + "s" * (self._missed > 1)
        return [
            f"Products outside of layers were heard for the first time when {steps} had not been listened to, for "
            "layers told of every weight that is multiplied: in those, they may be missing."
        ]

    def begin_anew(self) -> None:
        """There may be weights that were not there before."""
        self._steps = 0  # in which something was multiplied
        self._next = WARM - 1 + self._chance.randint(NEAR, FAR)  # the first that is listened to after the first ones
        self._all_seen: bool | None = None  # asked once, for it asks of every weight

    def expected(self) -> bool:
        """Whether the step that begins is listened to."""
        if self._heard or self._steps < WARM:
            return True
        if self._steps >= self._next:
            self._next = self._steps + self._chance.randint(NEAR, FAR)
            return True
        if self._all_seen is None:
            self._all_seen = not self._lacks()
        self._passed += self._all_seen
        return not self._all_seen

    def hears(self) -> None:
        """There was one."""
        if not self._heard:
            self._heard, self._missed = True, self._passed

    def ended(self, some: bool) -> None:
        """A step ended, in which something was multiplied or not."""
        self._steps += some
