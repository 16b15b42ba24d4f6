"""Steps that are not merged: every rank writes its own rows, and the lowest that is there says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from narrowgauge.observe.stats.transfer import Packed
from narrowgauge.observe.store import RunWriter

Keep = Callable[[Sequence[Packed]], None]  # has rows written by whose they are


class Apart:
    """This rank's rows of such steps.

    Args:
        keep: writes rows.
        writer: that is told of it.

    Attributes:
        steps: how many there were.
        in_a_row: how many since one was merged.
    """

    def __init__(self, keep: Keep, writer: RunWriter) -> None:
        self.steps = self.in_a_row = 0
        self._keep, self._writer = keep, writer
        self._missing: list[int] | None = None

    def keep(self, packed: Sequence[Packed]) -> None:
        """Write this rank's own rows."""
        self.steps += 1
        self.in_a_row += 1
        self.keep_further(packed)

    def keep_further(self, packed: Sequence[Packed]) -> None:
        """The same of what is beside a step that may be merged."""
        self._keep([replace(each, columns={"ranks": _ones(each)}) for each in packed])

    def tell(self, step: int, missing: list[int], rank: int, world: int) -> None:
        """Say who was missing, when that changes; one rank does."""
        here = [other for other in range(world) if other not in missing]
        if missing == self._missing or (here and here[0] != rank):
            return
        self._missing = missing
        who = f"rank {', '.join(map(str, missing))} had not recorded it" if missing else "a rank came too late"
        message = f"step {step} is not merged over the ranks: {who}; each wrote its own rows"
        self._writer.add_event(step, "ranks_apart", message, missing=missing)

    def end(self) -> None:
        """A step is merged."""
        self.in_a_row, self._missing = 0, None


def _ones(packed: Packed) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return np.ones(len(packed.operands[0]), np.int64), np.ones(len(packed.results[0]), np.int64)
