"""How a recorded step runs what the program compiled: uncompiled, or in graphs that are made for recorded steps.

    uncompiled    everything is heard as it is in any program, and the step takes as long as it did before compiling
    graphs        layers tell from inside; torch compiles once more, which may take minutes

So the first recorded steps run uncompiled: they show what there is to be seen, and whether a graph could tell of all of
it. Graphs are made once these steps have lost as much time as compiling takes: so watching costs at most twice what the
better way would have cost from the beginning.

What was heard in all uncompiled steps must be heard in graphs, too. If it is not, some steps are uncompiled again, as
programs have steps of several kinds (two models whose optimizers take turns); the third time ends graphs for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Wish = Literal["auto", "graphs", "uncompiled"]
TRIES = 3
Heard = frozenset[tuple[int, str, str]]  # by observer, name and role


class Choice:
    """One program's.

    Args:
        wish: what the settings say.
        lost: seconds that recorded steps took longer than others so far.
        compiling: seconds that torch has spent compiling.
        agreed: where several ranks train together, who wait for each other's compilers, whether they have agreed to
            begin; None where there is one.

    Attributes:
        refused: why recorded steps have no graphs, or no longer; "" if nothing is against them.
        graphs, uncompiled: whether the open step, or the last one, has graphs of its own, or runs uncompiled.
        steps: how many have had some.
    """

    def __init__(
        self,
        wish: Wish = "auto",
        lost: Callable[[], float] = lambda: 0.0,
        compiling: Callable[[], float] = lambda: float("inf"),
        agreed: Callable[[], bool | None] = lambda: None,
    ) -> None:
        self._wish, self._lost, self._compiling, self._agreed = wish, lost, compiling, agreed
        self._always: Heard | None = None  # what was heard in every uncompiled step
        self.refused = self._missing = ""
        self.graphs = self.uncompiled = False
        self.steps = self._failures = self._waits = 0  # of the last: uncompiled steps before the next try

    def begin(self, free: bool) -> bool:
        """A recorded step begins, and is `free` to go either way; whether it has graphs."""
        self.graphs = free and bool(self._always) and not self.refused and not self._waits and self._wanted()
        self.uncompiled = free and not self.graphs
        self.steps += self.graphs
        return self.graphs

    def why(self) -> str:
        """What makes recorded steps of this program long, in words; "" if it is not this."""
        if not self.uncompiled:
            return ""
        because = f", as {self.refused}" if self.refused else ""
        return f"what it compiled ran uncompiled{because}"

    @property
    def notes(self) -> list[str]:
        """That recorded steps have no graphs, or no longer, where somebody asked for them or they had some."""
        if not self.refused or not (self.steps or self._wish == "graphs"):
            missing = f"Recorded steps in whose graphs not all was seen: {self._failures} (first {self._missing})."
            return [missing] if self._failures else []
        return [f"Recorded steps ran what the program compiled uncompiled, not in graphs of their own: {self.refused}."]

    def _wanted(self) -> bool:
        if self._wish != "auto":
            return self._wish == "graphs"
        if self.steps:  # to make them has lengthened what compiling took
            return True
        agreed = self._agreed()
        return self.dear() if agreed is None else agreed

    def dear(self) -> bool:
        """Whether uncompiled steps have lost as much time as compiling would take, and nothing is against it."""
        return self._wish == "auto" and bool(self._always) and not self.refused and self._lost() >= self._compiling()

    def refuse(self, why: str) -> None:
        """No graphs from the next recorded step on; of several reasons the first is told."""
        self.refused = self.refused or why

    def ended(self, heard: Heard, inside: bool) -> None:
        """A recorded step was heard to its end, which is `inside` a compiled function's call or not."""
        if inside:
            self.refuse("its optimizer steps within a compiled function")
        if not self.graphs:
            self._always = heard if self._always is None else self._always & heard
            self._waits = max(0, self._waits - 1)
        elif self._always is not None and not self._always <= heard:
            _, name, role = min(self._always - heard)
            self._missing = self._missing or f"{name}:{role}"
            self._failures += 1
            self._waits = 1 + self._failures
            if self._failures == TRIES:
                self.refuse(f"{self._missing} was not seen in a graph")
