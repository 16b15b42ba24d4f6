"""Which optimizers make a step: programs that train in turns (a GAN, actor and critic) have steps of each.

turn   0, 1, ...   the parameters that step together, in the order in which they first did
"""

from __future__ import annotations

from collections.abc import Iterable

MOST = 16  # programs that make their optimizers anew, of new parameters, have ever more


class Turns:
    """The sets of parameters that have made a step."""

    def __init__(self) -> None:
        self._seen: dict[frozenset[int], int] = {}

    def of(self, stepped: Iterable[tuple[int, ...]]) -> int | None:
        """The number of a step's turn; None while all steps were alike, where nothing stepped and beyond `MOST`.

        `stepped`: of each optimizer that stepped its id, and the id of each group's first parameter.
        """
        firsts = frozenset(first for _, *groups in stepped for first in groups)
        if not firsts:
            return None
        if firsts not in self._seen and len(self._seen) < MOST:
            self._seen[firsts] = len(self._seen)
        return self._seen.get(firsts) if len(self._seen) > 1 else None
