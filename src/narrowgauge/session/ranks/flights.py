"""Gathers of this rank, from the promise to join one until it is done.

    agreed  --all ranks have met-->  under way  --done-->  landed (rank 0) or over

On a GPU every rank launches a gather between the same two steps, and so meeting is waited for: kernels of two groups
that ranks launch in different orders may each wait for the other. A gather on a CPU is joined whenever a rank comes by;
there training goes on while ranks meet, and a rank that dies before it has met holds up none. A step's scalars are put
into its table as it is launched, so that none are lost with one that only waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from narrowgauge.observe.stats.guard import Marks
from narrowgauge.session.ranks.group import Gather, Group
from narrowgauge.session.ranks.landing import Landing
from narrowgauge.session.ranks.layout import Layout
from narrowgauge.session.ranks.open_step import OpenStep
from narrowgauge.session.ranks.patience import POLL, Patience
from narrowgauge.session.ranks.scalars import Table, Waiting, rows_of

WAITING_BYTES = 256 << 20  # of tables; with more, meeting is waited for on a CPU as well


class Agreed(NamedTuple):
    """A step that all ranks will gather, as tables of `size` numbers."""

    mine: OpenStep
    size: int
    layouts: Sequence[Layout]


class Flight(NamedTuple):
    """A step, what came of its table, and the scalars in it; the layouts of all ranks' tables are known to rank 0."""

    mine: OpenStep
    gather: Gather
    layouts: Sequence[Layout]
    scalars: Table


class Flights:
    """This rank's.

    Args:
        group: of all ranks.
        landing: receives what a gather brought; None on all ranks but 0.
        account: is told the time that a step took, where nothing lands.
        waiting: rows of scalars, of which the oldest ride with a step.
        given_up: whether any rank joins no further gather.

    Attributes:
        merged: how many gathers are done.
    """

    def __init__(
        self,
        group: Group,
        landing: Landing | None,
        account: Callable[[Marks], None],
        waiting: Waiting,
        given_up: Callable[[], bool],
    ) -> None:
        self.group = group
        self.merged = 0
        self._landing, self._account = landing, account
        self._waiting, self._given_up = waiting, given_up
        self._agreed: deque[Agreed] = deque()
        self._flying: deque[Flight] = deque()
        self._lost = ""  # why those that are under way will not end

    def __bool__(self) -> bool:
        """Whether there is any that is not done."""
        return bool(self._agreed or self._flying)

    def add(self, agreed: Agreed, seconds: float) -> None:
        """All ranks have agreed to gather this step; if they still meet, see `launch`."""
        self._agreed.append(agreed)
        self.launch(seconds)

    def launch(self, seconds: float) -> None:
        """Launch what is agreed, if all ranks have met; on a GPU within `seconds` they have, or never will.

        Raises:
            RuntimeError: they did not, or one of them has given up since.
        """
        while self._agreed and self.group.ready(seconds, wait=self._bytes() > WAITING_BYTES):
            if self._given_up():
                raise RuntimeError("another rank has given up merging")
            mine, size, layouts = self._agreed[0]
            self._flying.append(self._launched(mine, size, layouts))
            self._agreed.popleft()  # not before: what could not be launched is still a step of ours

    def _launched(self, mine: OpenStep, size: int, layouts: Sequence[Layout]) -> Flight:
        scalars = self._waiting.take(mine.layout.scalars, mine.layout.rows)
        try:
            gather = self.group.gather(mine.with_scalars(torch.from_numpy(scalars), size))
        except Exception:  # nobody has them then
            self._waiting.give_back(rows_of(scalars, mine.layout.scalars))
            raise
        return Flight(mine, gather, layouts, scalars)

    def _bytes(self) -> int:
        return sum(mine.table.nbytes for mine, _, _ in self._agreed)

    def land(self) -> None:
        """Take in those that are done.

        Raises:
            RuntimeError: one was `lose`d, or has failed.
        """
        self.miss()
        while self._flying and self._flying[0].gather.done():
            self.miss()  # what was aborted is done as well
            mine, gather, layouts, _ = self._flying[0]
            if self._landing is not None:
                self._landing.receive(mine.step, layouts, gather, mine.marks)
            else:
                gather.check()
                self._account(mine.marks)
            self._flying.popleft()
            self.merged += 1

    def settle(self, patience: Patience, others: Collection[int]) -> None:
        """The program ended: the spare seconds for ranks that still meet, then some for what is under way to `others`.

        Raises:
            RuntimeError: ranks did not meet, or did not join, or see `land`.
        """
        meeting, began = patience.spare, time.monotonic()
        while self._agreed:
            self.launch(meeting)
            if self._agreed and time.monotonic() >= began + meeting:
                raise RuntimeError(f"the ranks had not met when the program ended, nor in {meeting:g} s more")
            time.sleep(POLL if self._agreed else 0.0)
        patience.spent(time.monotonic() - began)
        began = time.monotonic()
        if not patience.wait(self._landed, lambda: patience.rest_coming(others)):
            waited = time.monotonic() - began
            raise RuntimeError(f"another rank had not come by when this one ended, nor in {waited:.0f} s more")

    def _landed(self) -> bool:
        self.land()
        return not self._flying or self.group.aborted

    def arrive(self, patience: float) -> None:
        """Take in what is done within so many seconds, see `land`."""
        deadline = time.monotonic() + patience
        while self._flying and not self.group.aborted and time.monotonic() < deadline:
            self.land()
            time.sleep(POLL if self._flying else 0.0)

    def oldest(self) -> float | None:
        """When the oldest that is under way began (`time.monotonic`); asked by another thread."""
        try:
            return self._flying[0].gather.began
        except IndexError:
            return None

    def lose(self, why: str) -> None:
        """Those that are under way will not end; told by another thread, and seen to when the program comes by."""
        self._lost = why
        self.group.abort()

    def miss(self) -> None:
        """Raise (RuntimeError) what `lose` was told."""
        why, self._lost = self._lost, ""
        if why:
            raise RuntimeError(why)

    def steps(self) -> Iterator[OpenStep]:
        """The steps of all that are not done, the oldest first."""
        yield from (flight.mine for flight in self._flying)
        yield from (mine for mine, _, _ in self._agreed)

    def clear(self) -> None:
        """Forget them; their scalars wait again."""
        taken = (rows_of(flight.scalars, flight.mine.layout.scalars) for flight in self._flying)
        self._waiting.give_back([row for rows in taken for row in rows])
        self._flying.clear()
        self._agreed.clear()
