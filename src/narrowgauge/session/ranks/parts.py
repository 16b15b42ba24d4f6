"""Which part of a model each rank runs, by step: a step's scalars are merged by the layouts of that step.

They may be told with a later one, when the program runs another model: what a GPU computed is read steps after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.session.ranks.layout import Layout

MOST = 256  # changes that are remembered: models that take turns change with each step


@dataclass(frozen=True, slots=True)
class Parts:
    """Of each rank, as `laws.merged` wants them."""

    kinds: Sequence[str]
    meshes: Sequence[int | None]
    began: Sequence[str]
    families: Sequence[str]

    @classmethod
    def of(cls, layouts: Sequence[Layout], families: Sequence[str]) -> Parts:
        """What all ranks' layouts say."""
        kinds, began = [one.sites for one in layouts], [one.began for one in layouts]
        return cls(kinds, [one.mesh for one in layouts], began, list(families))

    def of_ranks(self, ranks: Sequence[int]) -> Parts:
        """Those of some of them, in that order."""
        kinds, meshes = [self.kinds[rank] for rank in ranks], [self.meshes[rank] for rank in ranks]
        return Parts(kinds, meshes, [self.began[rank] for rank in ranks], [self.families[rank] for rank in ranks])


class PartsByStep:
    """As recorded steps told; of a step between them as the one before, or the first, did."""

    def __init__(self, world: int) -> None:
        self._unknown = Parts([""] * world, [None] * world, [""] * world, [""] * world)
        self._found: deque[tuple[int, Parts]] = deque(maxlen=MOST)

    def add(self, step: int, parts: Parts) -> None:
        """A recorded step tells; in the order of steps."""
        if not self._found or self._found[-1][1] != parts:
            self._found.append((step, parts))

    def at(self, step: int) -> Parts:
        """What is known of a step."""
        parts = self._found[0][1] if self._found else self._unknown
        return next((known for since, known in reversed(self._found) if since <= step), parts)
