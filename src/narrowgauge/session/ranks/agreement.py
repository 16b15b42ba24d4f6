"""How ranks agree whether they merge a step, without one waiting for another.

    end of recorded step s     every rank:  add 1 to the step's count; who completes it sets   what[s] = "merge ..."
    LAG steps later            every rank:  compare_set(what[s], "" -> "apart")                one answer for all

A collective that one rank starts and another does not would hang. Here all read the same key, which is set once, and
"merge" is only ever set when every rank has its table ready and will come by: from there it can but die. All of it are
small keys in the store that the program's own process group came up by, asked over a connection of our own.

But it can: who gives up merging after its promise says so by one more key, which is asked before each gather.

Keys, for W ranks: n/<step> (a counter), of/<step>/<rank> (what the rank posted of it), what/<step>,
layout/<digest>, over (the least of the last steps of ranks that have come to their end), and of each rank's end
end/<rank>, read/<rank>, known/<rank>. A step's keys are deleted as soon as every rank is known to have read them.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

from narrowgauge.session.ranks.answering import Answering
from narrowgauge.session.ranks.pulse import give_up, given_up

MERGE, APART = "merge", "apart"
LAG = 4  # steps: a rank whose host is that far ahead of another's goes on without it


class Posted(NamedTuple):
    """What a rank says of its table of a step: how many numbers, on which kind of device, in which order.

    `dear`: it finds that recorded steps are worth compiling for. All begin at once, or each would wait for each.
    `short`: its steps are so short that rows of those between may be brief. All are, or none can be merged as a whole.
    """

    size: int
    device: str
    digest: str
    dear: bool = False
    short: bool = False


class Decision(NamedTuple):
    """What all ranks do with a step: merge tables of `size` numbers, or (size 0) each for itself.

    `dear`: any of them finds that recorded steps are worth compiling for; `short`: all of them find theirs short.
    """

    size: int
    dear: bool = False
    short: bool = False

    @property
    def merge(self) -> bool:
        """Whether the step is merged."""
        return self.size > 0


class Agreement:
    """One rank's view of it.

    Args:
        store: a `torch.distributed.Store` that all ranks share.
        rank, world: which of how many.
        patience: seconds after which a store that does not answer is given up (an exception).
    """

    def __init__(self, store: Any, rank: int, world: int, patience: float = 10.0) -> None:
        self._store, self._rank, self._world = Answering(store, patience), rank, world
        self._store.set(f"here/{rank}", "")
        self._known: set[str] = set()
        self._undeleted: deque[int] = deque()
        self._last = 0

    def post(self, step: int, mine: Posted, layout: str) -> None:
        """This rank's table of `step` is ready; `layout` is sent if it has not been yet."""
        if mine.digest not in self._known:
            self._store.set(f"layout/{mine.digest}", layout)
            self._known.add(mine.digest)
        said = f"{mine.size} {mine.device} {mine.digest} {mine.dear:d} {mine.short:d}"
        self._store.set(f"of/{step}/{self._rank}", said)
        self._undeleted.append(step)
        self._last = step
        if self._store.add(f"n/{step}", 1) == self._world:
            posted = self.posted(step)
            alike = len({each.device for each in posted}) == 1
            dear, short = any(p.dear for p in posted), all(p.short for p in posted)
            merge = f"{MERGE} {max(p.size for p in posted)} {dear:d} {short:d}"
            self._store.compare_set(f"what/{step}", "", merge if alike else APART)

    def decided(self, step: int) -> Decision | None:
        """What was decided, if anything was; nothing is decided by asking."""
        if not self._store.check([f"what/{step}"]):
            return None
        return _read(self._store.get(f"what/{step}"))

    def decide(self, step: int) -> Decision:
        """What all ranks do with `step`; a step that not every rank has posted is not merged, from now on."""
        decision = _read(self._store.compare_set(f"what/{step}", "", APART))
        if decision.merge and self._rank == 0:
            self._tidy(step)
        return decision

    def posted(self, step: int) -> list[Posted]:
        """What every rank posted, in their order; only if all of them have."""
        found = self._store.multi_get([f"of/{step}/{rank}" for rank in range(self._world)])
        fields = (each.decode().split() for each in found)
        return [
            Posted(int(size), device, digest, dear == "1", short == "1") for size, device, digest, dear, short in fields
        ]

    def missing(self, step: int) -> list[int]:
        """The ranks that have not posted `step`."""
        return [rank for rank in range(self._world) if not self._store.check([f"of/{step}/{rank}"])]

    def layout(self, digest: str) -> str:
        """The layout of a digest that was posted."""
        return str(self._store.get(f"layout/{digest}").decode())

    def is_here(self, rank: int) -> bool:
        """Whether a rank has ever come here, as each one does that makes a step; True if the store does not say."""
        with suppress(Exception):
            return bool(self._store.check([f"here/{rank}"]))
        return True

    def end(self) -> None:
        """Tell that this rank posts no further step."""
        told = int(self._store.compare_set("over", "", str(self._last)))
        while told > self._last:
            told = int(self._store.compare_set("over", str(told), str(self._last)))

    def is_over(self, step: int) -> bool:
        """Whether a rank that has not posted `step` has told that it posts no further one."""
        return bool(self._store.check(["over"])) and step > int(self._store.get("over"))

    def leave(self, text: str) -> None:
        """Leave `text` for rank 0, as the last thing that this rank has to say."""
        self._store.set(f"end/{self._rank}", text)

    def left(self, rank: int) -> str | None:
        """What a rank left, if it has; it is told that it was read."""
        if not self._store.check([f"end/{rank}"]):
            return None
        text = str(self._store.get(f"end/{rank}").decode())
        self._store.set(f"read/{rank}", "")
        return text

    def give_up(self) -> None:
        """Tell all ranks that this one joins no further gather, whatever was agreed."""
        give_up(self._store.store)

    def given_up(self) -> bool:
        """Whether any rank told so."""
        return given_up(self._store)

    def was_read(self) -> bool:
        """Whether rank 0 has read what this rank left; it is told that this rank knows."""
        read = bool(self._store.check([f"read/{self._rank}"]))
        if read:
            with suppress(Exception):  # it may have gone on, and the store with it
                self._store.set(f"known/{self._rank}", "")
        return read

    def knows(self, rank: int) -> bool:
        """Whether a rank knows that what it left was read, and asks for nothing more."""
        return bool(self._store.check([f"known/{rank}"]))

    def _tidy(self, step: int) -> None:
        """Delete what nobody asks for any more: all have posted `step`, and so decided what lies LAG before it."""
        while self._undeleted and self._undeleted[0] <= step - LAG:
            old = self._undeleted.popleft()
            for key in (f"n/{old}", f"what/{old}", *(f"of/{old}/{rank}" for rank in range(self._world))):
                with suppress(Exception):  # a store that cannot delete
                    self._store.delete_key(key)


def _read(value: bytes) -> Decision:
    what, *numbers = value.decode().split()
    return Decision(int(numbers[0]), *(flag == "1" for flag in numbers[1:])) if what == MERGE else Decision(0)
