"""Which recorded steps all recipes look at where nobody asked for it: the 1st, the 4th, the 16th, the 64th, ...

A look by one more recipe costs as much as the recorded step's own. So the sum of these grows with the logarithm of a
run's length, and the shortest run has one. Where optimizers take turns, the next steps are added (turns.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from narrowgauge.session.selection.turns import Turns


class Seldom:
    """Counts recorded steps, of those that are recorded together the first."""

    def __init__(self) -> None:
        self._recorded = 0
        self._turns = Turns()

    def due(self, step: int, *, first: bool, recorded: bool) -> bool:
        """Whether a step that begins is one of them.

        Args:
            step: which.
            first: it is recorded, and not only because of the one before.
            recorded: it is recorded.
        """
        self._recorded += first
        return self._turns.recorded(step, first and _power_of_four(self._recorded)) and recorded

    def stepped(self, optimizers: Collection[int]) -> None:
        """These, by their ids, stepped in the open step."""
        self._turns.stepped(optimizers)

    def passed(self, last: Mapping[int, int], gaps: Mapping[int, int]) -> None:
        """As of a recorder."""
        self._turns.passed(last, gaps)


def _power_of_four(number: int) -> bool:
    """Whether it is 1, 4, 16, 64, ...

    >>> [n for n in range(70) if _power_of_four(n)]
    [1, 4, 16, 64]
    """
    return number.bit_count() == 1 and number.bit_length() % 2 == 1
