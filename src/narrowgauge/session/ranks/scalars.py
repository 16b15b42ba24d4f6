"""Scalars on their way to be merged: each rank's rows wait for the next collective, and rank 0 joins them by step.

    a rank's rows    step -> names and numbers, in the order in which they arrived from its device
    rank 0           a step is merged as soon as every rank's row of it is there

Ranks read their devices late and not equally late, so rows of one step may come by different collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from narrowgauge.session.ranks import laws

NONE = -(2.0**1000)  # no number that anybody records, NaN among them, and exact
MOST = 4096  # rows that wait on a rank, and steps that wait on rank 0

Rows = list[tuple[int, dict[str, float]]]
Table = npt.NDArray[np.float64]


class Waiting:
    """One rank's rows that no collective has taken yet.

    The writer's thread may add some while a collective takes others. There is no lock, which a forked child could find
    held for ever: whoever wants a row has it by `popleft`, which gives each to one alone.

    Attributes:
        tell: has rows added that somebody holds back, asked before any are taken.
    """

    def __init__(self) -> None:
        self.tell: Callable[[], None] = _nothing
        self._rows: deque[tuple[int, dict[str, float]]] = deque()
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that was seen, in the order of first sight."""
        return tuple(self._names)

    def add(self, step: int, row: dict[str, float]) -> tuple[int, dict[str, float]] | None:
        """Queue a row; the oldest if there are more than may wait."""
        self._names |= dict.fromkeys(row)
        self._rows.append((step, row))
        return self._oldest() if len(self._rows) > MOST else None

    def take(self, names: Sequence[str], rows: int) -> Table:
        """The oldest, as a table [rows, 1 + N] of a step and its numbers, `NONE` where there is none.

        Those that have a name which is not among `names` go with a later collective.
        """
        self.tell()
        table = np.full((rows, 1 + len(names)), NONE)
        place = {name: 1 + i for i, name in enumerate(names)}
        for line in table:
            oldest = self._oldest()
            if oldest is None:
                break
            step, row = oldest
            if not place.keys() >= row.keys():
                self._rows.appendleft(oldest)
                break
            line[0] = step
            for name, value in row.items():
                line[place[name]] = value
        return table

    def give_back(self, rows: Rows) -> None:
        """What was taken goes with a later collective: this one could not begin."""
        self._rows.extendleft(reversed(rows))

    def rest(self) -> Rows:
        """All that wait; none are left."""
        rest: Rows = []
        while (oldest := self._oldest()) is not None:
            rest.append(oldest)
        return rest

    def _oldest(self) -> tuple[int, dict[str, float]] | None:
        """The one that waits longest, for whoever asks first; None if none waits."""
        try:
            return self._rows.popleft()
        except IndexError:
            return None


def _nothing() -> None:
    """Nobody holds anything back."""


def rows_of(table: Table, names: Sequence[str]) -> Rows:
    """The inverse of `take`."""
    return [
        (int(line[0]), {name: float(v) for name, v in zip(names, line[1:], strict=True) if v != NONE})
        for line in table
        if line[0] != NONE
    ]


class Joined:
    """Rows of all ranks by step, on rank 0."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._steps: dict[int, dict[int, dict[str, float]]] = {}

    def add(self, rank: int, rows: Iterable[tuple[int, dict[str, float]]]) -> None:
        """Take a rank's rows."""
        for step, row in rows:
            self._steps.setdefault(step, {})[rank] = row
        while len(self._steps) > MOST:  # a rank that is gone left them incomplete
            self._steps.pop(next(iter(self._steps)))

    def lacking(self, ranks: Iterable[int]) -> list[int]:
        """The steps that wait for a row of any of these ranks, in their order."""
        wanted = set(ranks)
        return sorted(step for step, rows in self._steps.items() if wanted - rows.keys())

    def complete(self, *, anyway: bool = False) -> Iterable[tuple[int, dict[int, dict[str, float]]]]:
        """Steps of which every rank's row is there (`anyway`: all), and their rows; they leave."""
        for step in sorted(self._steps):
            if anyway or len(self._steps[step]) == self._world:
                yield step, self._steps.pop(step)


def disagreements(rows: dict[int, dict[str, float]], kinds: Sequence[str]) -> dict[str, dict[int, float]]:
    """As `laws.disagreeing`, by rank."""
    ranks = sorted(rows)
    found = laws.disagreeing([rows[rank] for rank in ranks], [kinds[rank] for rank in ranks])
    return {name: {ranks[i]: value for i, value in values.items()} for name, values in found.items()}
