"""Optimizers that take turns, and a cadence that would meet the same one for ever.

    step        1  2  3  4  5  6  7  8  9 10 11 12      a GAN: its critic steps, then its generator
    optimizer   C  G  C  G  C  G  C  G  C  G  C  G
    every 10                               x  +  +      10 is due; 11 and 12 are recorded because of the turns

Each of them should have a step that is recorded together with the one before it: a generator is often called in the
critic's turn, and has its gradient in its own. Where all optimizers step together, nothing is added; nor is one awaited
that has been silent for longer than ever between two of its steps, as an optimizer that another one has replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MOST = 8  # steps that are added to one; an optimizer that was silent for longer takes no turns


class Turns:
    """Which steps are recorded in addition to those that are due."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # the step that each optimizer stepped in
        self._longest: dict[int, int] = {}  # steps from one of its steps to its next
        self._awaited: set[int] = set()
        self._step = self._until = 0
        self._before = self._now = False  # the step before was recorded; the open one is

    def recorded(self, step: int, due: bool) -> bool:
        """Whether a step that begins is recorded, which is `due` or not."""
        self._before = self._now and step == self._step + 1
        if due:
            self._last = {who: last for who, last in self._last.items() if step - last <= self._longest.get(who, MOST)}
            self._awaited = set(self._last) if len(self._last) > 1 else set()
            self._until = step + MOST
        self._step, self._now = step, due or self.awaits(step)
        return self._now

    def awaits(self, step: int) -> bool:
        """Whether a step that comes next is recorded, due or not."""
        return bool(self._awaited) and step <= self._until

    def passed(self, last: Mapping[int, int], gaps: Mapping[int, int]) -> None:
        """As of a recorder."""
        for who, at in last.items():
            if who in self._last:
                self._longest[who] = max(self._longest.get(who, 0), min(MOST, gaps.get(who, 0)))
            elif at <= self._step:  # it was silent for too long then, and is since
                continue
            self._last[who] = at

    def stepped(self, optimizers: Collection[int]) -> None:
        """These, by their ids, stepped in the open step."""
        for who in optimizers:
            last = self._last.get(who)
            if last is not None and (self._step - last or 1) > self._longest.get(who, 0):
                self._longest[who] = min(MOST, self._step - last or 1)
            self._last[who] = self._step
        if self._now and (self._before or self._awaited <= set(optimizers)):
            self._awaited -= set(optimizers)
