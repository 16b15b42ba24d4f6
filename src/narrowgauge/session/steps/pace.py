"""What a recorded step costs, by the clock: it takes longer than another, and some steps in so many are recorded.

    price  = recorded / other - 1           in steps: 0.3 where a recorded one takes 1.3 times as long
    share  = price * recorded / all steps   by so much longer the program took for being watched

Both times are medians of the latest steps in which nothing else fell: no evaluation, no probe. So the first ones, which
compile and fill caches, are not what is told. A program that compiles pays most: recorded, it runs without its graphs.
Of a trial of a few seconds nothing is said: what it lost is nobody's matter.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

LATEST = 64
FEWEST = 3  # steps of a kind, before anything is said of it
SHORT, SETTLED = 0.1, 32  # seconds of a step, and so many steps, before it is called short
MANY = 400  # parameters: of more, as many times that; a whole row takes 0.8 us of each, to tell whether it was stepped
DEAR, CHEAP = 0.05, 0.02  # shares: of what is told, and of what is proposed
WORTH_TELLING = 5.0  # seconds that the program lost
CADENCES = tuple(step * 10**power for power in range(1, 6) for step in (1, 2, 5))


class Pace:
    """The seconds of recorded steps and of others.

    >>> pace = Pace()
    >>> for step in range(40): pace.add(6.0 if step % 10 == 0 else 2.0, recorded=step % 10 == 0)
    >>> pace.facts()
    {'recorded_step_seconds': 6.0, 'other_step_seconds': 2.0}
    >>> pace.note("it ran uncompiled").partition("; ")[0]
    'Watching made the program 20% slower: a recorded step took 3.0 times as long as another (it ran uncompiled)'
    """

    def __init__(self) -> None:
        self._seconds = {recorded: deque[float](maxlen=LATEST) for recorded in (True, False)}
        self._steps = {True: 0, False: 0}
        self._apart = deque[float](maxlen=LATEST)  # of others, without what else fell between two of them
        self._parted = 0  # such steps
        self._all = 0.0  # seconds of recorded steps
        self.parameters: Callable[[], int] = lambda: 0  # how many are trained

    def add(self, seconds: float, *, recorded: bool) -> None:
        """A step took so long, and nothing but its recording fell into it."""
        self._seconds[recorded].append(seconds)
        self._steps[recorded] += 1
        self._all += seconds if recorded else 0.0

    def add_apart(self, seconds: float) -> None:
        """A step that was not recorded took so long without an evaluation, which fell between it and the last one.

        A program may have one before each of its steps: an agent's rollout, a graph of which all nodes are looked at.
        """
        self._apart.append(seconds)
        self._parted += 1

    def passed(self, steps: int = 1) -> None:
        """So many steps were made that nobody timed, and that were not recorded."""
        self._steps[False] += steps

    @property
    def short(self) -> bool:
        """Whether steps are known to be so short that it can be measured what a whole row of each takes."""
        others = self._seconds[False]
        if self._steps[False] < SETTLED and self._parted >= SETTLED:
            others = self._apart
        elif self._steps[False] < SETTLED or len(others) < FEWEST:
            return False
        return statistics.median(others) < SHORT * max(1.0, self.parameters() / MANY)

    def _medians(self) -> tuple[float, float] | None:
        """Of a recorded step and of another; None before there are enough of both."""
        if min(map(len, self._seconds.values())) < FEWEST:
            return None
        recorded, other = (statistics.median(self._seconds[kind]) for kind in (True, False))
        return (recorded, other) if other > 0 else None

    def facts(self) -> dict[str, Any]:
        """For the run's metadata; empty before both kinds are known."""
        medians = self._medians()
        return {} if medians is None else {"recorded_step_seconds": medians[0], "other_step_seconds": medians[1]}

    def lost(self) -> float:
        """Seconds that recorded steps took longer than others; where there are no others, a fifth of what they took."""
        medians = self._medians()
        if medians is not None:
            return (medians[0] - medians[1]) * self._steps[True]
        return 0.2 * self._all if not self._steps[False] else 0.0

    def note(self, why: str, *, once: str = "") -> str:
        """What watching took of the program's time, and what cadence would take little; "" where it was little.

        `why` is a reason that the next run has as well, `once` one that it has not: then no cadence mends anything.
        """
        medians = self._medians()
        if medians is None:
            return ""
        times = medians[0] / medians[1]
        share = (times - 1) * self._steps[True] / sum(self._steps.values())
        if share < DEAR or (medians[0] - medians[1]) * self._steps[True] < WORTH_TELLING:
            return ""
        told = (
            f"Watching made the program {share:.0%} slower: a recorded step took {times:.1f} times as long as another"
        )
        if once and not why:
            return f"{told} ({once}); later runs pay less."
        every = next((every for every in CADENCES if (times - 1) / every <= CHEAP), CADENCES[-1])
        because = f" ({why})" if why else ""
        return f"{told}{because}; with every = {every} it would be {(times - 1) / every:.1%}."
