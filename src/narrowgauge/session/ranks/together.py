"""Steps on their way to be one of all ranks: told of, agreed on, gathered, merged. What fails in here is raised.

    add        the step's table is ready here, and the store is told; the step is open
    decide     LAG steps later all ranks decide alike (agreement.py)
    gather     as they decided to: the step is one of the flights (flights.py)
    land       what has arrived is merged, on rank 0 (landing.py)

A gather is launched at a place in the program that is the same on all ranks: between two steps. Whoever dies between
its promise to come by and that place is missed by the others (pulse.py), who end the gather.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from narrowgauge.observe.stats.guard import Marks
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.ranks.agreement import LAG, Agreement, Decision, Posted
from narrowgauge.session.ranks.flights import Agreed, Flights
from narrowgauge.session.ranks.group import MEETING, Group
from narrowgauge.session.ranks.landing import Landing
from narrowgauge.session.ranks.last_words import fetch, leave
from narrowgauge.session.ranks.layout import Layout
from narrowgauge.session.ranks.meeting import Meeting
from narrowgauge.session.ranks.open_step import OpenStep
from narrowgauge.session.ranks.patience import Patience
from narrowgauge.session.ranks.pulse import BEAT, GONE, Pulse
from narrowgauge.session.ranks.scalars import Waiting

ARRIVE = 0.1  # seconds for what others have sent, before this rank gives up merging


class Together:
    """This rank's part in it.

    Args:
        ranks: all of them.
        waiting: rows of scalars, of which the oldest ride with a step.
        account: is told the time that a step took, where nothing lands.

    Attributes:
        open: the steps that nothing is decided of, the oldest first.
        landing: receives what is gathered; None on all ranks but 0.
    """

    def __init__(self, ranks: Meeting, waiting: Waiting, account: Callable[[Marks], None]) -> None:
        self._all, self._waiting, self._account = ranks, waiting, account
        self.open: deque[OpenStep] = deque()
        self.landing: Landing | None = None
        self._agreement: Agreement | None = None
        self._flights: Flights | None = None
        self._pulse: Pulse | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to see to when the program comes by."""
        return bool(self.open or self._flights or (self.landing is not None and self.landing.waits))

    def begin(self) -> None:
        """The ranks have met: this one can agree with the others."""
        self._agreement = Agreement(self._all.store("agreement"), self._all.rank, self._all.world)

    # A step's way.

    def add(self, mine: OpenStep, *, dear: bool, short: bool) -> None:
        """A step's table is ready here; `dear` and `short`, see `Posted`."""
        self._gather_on(mine.table.device)
        assert self._agreement is not None
        posted = Posted(max(mine.size, 1), mine.table.device.type, mine.layout.digest, dear, short)
        self._agreement.post(mine.step, posted, mine.layout.text)
        self.open.append(mine)

    def _gather_on(self, device: torch.device) -> None:
        """Have all ranks meet, and tell each other that they are there; the first time only."""
        if self._flights is None:
            group = Group(self._all.store("gather"), self._all.rank, self._all.world, device)
            assert self._agreement is not None
            self._flights = Flights(group, self.landing, self._account, self._waiting, self._agreement.given_up)
        if self._pulse is None:
            store, flights = self._all.store("agreement"), self._flights
            self._pulse = Pulse(store, self._all.rank, self._all.world, flights.oldest, flights.lose, BEAT, GONE)

    def launch(self) -> None:
        """Between two steps: launch what is agreed, see `Flights.launch`."""
        if self._flights is not None:
            self._flights.miss()
            self._flights.launch(MEETING)

    def due(self, step: int) -> bool:
        """Whether the oldest open step is to be decided as `step` begins."""
        return bool(self.open) and step >= self.open[0].step + LAG

    def decide(self) -> Decision:
        """What all ranks do with the oldest open step."""
        assert self._agreement is not None
        return self._agreement.decide(self.open[0].step)

    def missing(self) -> list[int]:
        """The ranks that have not told of it."""
        assert self._agreement is not None
        return self._agreement.missing(self.open[0].step)

    def gather(self, mine: OpenStep, size: int, patience: float) -> None:
        """It was decided to merge the oldest open step, `mine`: gather tables of `size` numbers."""
        assert self._flights is not None
        assert self._agreement is not None
        layouts: list[Layout] = []
        if self._all.rank == 0:
            texts = {each.digest: each for each in self._agreement.posted(mine.step)}
            known = {digest: Layout.parse(self._agreement.layout(digest)) for digest in texts}
            layouts = [known[each.digest] for each in self._agreement.posted(mine.step)]
        self.open.popleft()  # from here on it is one of the flights, whatever becomes of that
        self._flights.add(Agreed(mine, size, layouts), patience)

    def land(self) -> None:
        """Take in the gathers that are done, and what has reached the host."""
        if self._flights is not None:
            self._flights.land()
        if self.landing is not None:
            self.landing.look()

    # The end, and other ways out.

    def end(self) -> None:
        """This rank makes no further step."""
        if self._agreement is not None:
            self._agreement.end()

    def wait(self, patience: Patience) -> bool:
        """Until something is decided of all open steps, or there is no more patience; whether all is.

        Of one that a rank which came to its end has not made, nothing is left to decide.
        """
        agreement = self._agreement
        assert agreement is not None

        def undecided() -> list[int]:
            steps = [mine.step for mine in self.open]
            return [step for step in steps if agreement.decided(step) is None and not agreement.is_over(step)]

        return patience.wait(
            lambda: not undecided(), lambda: any(patience.all_coming(agreement.missing(step)) for step in undecided())
        )

    def settle(self, patience: Patience) -> None:
        """The program ended, and all is decided: see `Flights.settle`."""
        if self._flights is not None:
            others = range(1, self._all.world) if self._all.rank == 0 else (0,)
            self._flights.settle(patience, others)
        self.land()

    def is_here(self, rank: int) -> bool:
        """Whether a rank has ever come here, as each one does that makes a step."""
        return self._agreement is None or self._agreement.is_here(rank)

    def last_words(self, writer: RunWriter, patience: Patience, *, merging: bool) -> str:
        """Bring to rank 0 the scalars that no gather has taken; unless `merging`, it has those that came until then.

        What is missing, if anything is.
        """
        if self._agreement is None:
            return ""
        if not merging:
            if self.landing is not None:
                self.landing.join(0, self._waiting.rest())
                self.landing.finish()
        elif self.landing is None:
            leave(self._agreement, self._waiting, writer, patience.seconds)
        else:
            return fetch(self._agreement, self._waiting, self.landing, self._all.world, patience)
        return ""

    def end_gathers(self) -> None:
        """Take in what is as good as done, and wait for nothing else that is under way."""
        if self._flights is not None:
            with suppress(Exception):  # what this is done for, again
                self._flights.arrive(ARRIVE)
            if self._flights:  # nobody else will end them, once the pulse has stopped
                self._flights.group.abort()

    def give_up(self) -> None:
        """Tell all ranks that this one joins no further gather."""
        self.stop()
        if self._agreement is not None and self._flights is not None:
            self._agreement.give_up()

    def stop(self) -> None:
        """Give no further sign of life."""
        if self._pulse is not None:
            self._pulse.stop()

    def close(self, *, broken: bool) -> None:
        """Leave the group of all ranks; `broken`, see there."""
        if self._flights is not None:
            if self._flights.group.meeting:
                self._all.keep()
            self._flights.group.close(broken=broken or bool(self._flights))

    def forget(self) -> None:
        """This is a forked child: nothing here is its own."""
        self._agreement, self._pulse = None, None
        self.clear()

    # What there is.

    def steps(self) -> list[OpenStep]:
        """All that are not merged, the oldest first."""
        return [*(() if self._flights is None else self._flights.steps()), *self.open]

    def clear(self) -> None:
        """Forget them; their scalars wait again."""
        self.open.clear()
        if self._flights is not None:
            self._flights.clear()

    @property
    def world(self) -> int:
        """How many ranks there are; 0 before they met."""
        return self._all.world

    @property
    def merged(self) -> int:
        """How many gathers are done."""
        return 0 if self._flights is None else self._flights.merged

    @property
    def backend(self) -> str | None:
        """What they were sent by; None before the first."""
        return None if self._flights is None else self._flights.group.backend
