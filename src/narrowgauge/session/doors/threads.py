"""Which thread of a program is followed: the one that trains.

first      who begins a training step, or steps an optimizer
another    takes its place when it has ended, or is between steps and the other goes on with what it trains. What
           else trains meanwhile is told, and so are two that train the same at once
backward   on a GPU, torch runs it in threads of its own, for the one that called it and waits
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import ReferenceType, WeakSet, ref

from narrowgauge.compute.nn.scaling.clock import inside_backward


class Handing(Protocol):
    """Knows how far the thread that is followed has come, and lets another go on."""

    @property
    def steps(self) -> int:
        """How many steps were made."""
        ...

    def between_steps(self, turn_began: int) -> bool:
        """Whether it has begun nothing that it has yet to end."""
        ...

    def proven(self, turn_began: int) -> bool:
        """Whether it has made a step since so many were made."""
        ...

    def only_looked(self, turn_began: int) -> bool:
        """Whether it has made no step since, and called no backward: it may evaluate, with gradients on."""
        ...

    def doubt(self) -> None:
        """What it has begun may be no step: the next forward begins anew."""
        ...

    def drop(self) -> None:
        """What it has begun is no step, and leaves nothing."""
        ...

    def hand_over(self) -> int:
        """Forget what it was about, for another thread goes on; returns how many steps were made."""
        ...


class _Thread:
    """One of the program's, as long as it runs: the system gives its number to the next one when it has ended."""


class _OfThread(threading.local):
    """In each thread what stands for it, which ends with it and keeps nothing of the program's."""

    def __init__(self) -> None:
        self.itself = _Thread()


_EVERY: WeakSet[Threads] = WeakSet()


class Threads:
    """Which thread is followed.

    `turn` counts the threads that were followed; `handing` is the session's. `ident` is the number of the one that is,
    as long as it runs; above 0, `deaf` says that what the program does now is no training. `waits`: the one that trains
    has called `backward`, which has not returned. `others`: of another that trains, too, nothing is recorded.
    """

    handing: Handing

    def __init__(self) -> None:
        self._here = _OfThread()
        self._thread: ReferenceType[_Thread] | None = None
        self._before: ReferenceType[_Thread] | None = None  # had the turn before it
        self._before_trained = False  # it had made a step in its turn
        self.ident = 0
        self.turn, self._turn_began = 0, 0
        self._changing = threading.RLock()
        _EVERY.add(self)
        self.others = False
        self._at_once = False  # threads train the same at once: there are no turns any more
        self._met: int | None = None  # how many steps were made when it seemed so last
        self._met_with: WeakSet[_Thread] = WeakSet()  # who is not followed since then, and made no step either
        self._refused: WeakSet[_Thread] = WeakSet()  # threads in which a step was begun that is not followed
        self.waits = False  # the thread that trains has called `backward`, which has not returned
        self.deaf = 0

    def mine(self) -> bool:
        """Whether the calling thread is the one that trains, or runs its backward pass for it.

        The first to ask is the one that trains, until it ends or another `goes_on`.
        """
        if self.deaf:
            return False
        if threading.get_ident() == self.ident:
            return True
        if inside_backward():  # says nothing of who trains: whoever called `backward` was asked about then
            return self.waits and not self.refused
        if _runs(self._thread) or (_runs(self._before) and not self._is_here(self._before)):
            return False
        if self._back():
            self.handing.doubt()
        self._follow(None)
        return True

    def goes_on(self, same: Callable[[], bool | None], steps: bool = False) -> bool:
        """Whether the calling thread, which is not the one that trains, goes on with that training: then it is.

        `same()` says whether what it does is of that training, and None if it is no training. Who `steps`, with an
        optimizer, trains: beside it a thread that only called the model was taken for the one that does by mistake.
        """
        if self.deaf or threading.get_ident() == self.ident or inside_backward():
            return False
        while True:
            turn, found = self.turn, same()  # runs code of the program's, which may wait for other threads of it
            if found is None:
                return False
            with self._changing:
                if turn == self.turn:
                    return self._decides(found, steps)

    def _decides(self, found: bool, steps: bool) -> bool:
        if found:
            self._settle(steps)
        if found and steps and _runs(self._thread) and self.handing.only_looked(self._turn_began):
            self._meet(self._thread)
            self.handing.drop()
            self._turn_began = self.handing.hand_over()
            self._follow(None)
            return True
        if found and _runs(self._thread) and not self.handing.between_steps(self._turn_began):
            self._meet(self._thread if self._back() else ref(self._here.itself))
        at_once = self._at_once or self._met is not None
        if found and (self._back() or not at_once):
            self.others |= at_once
            before, trained = self._before, self._before_trained
            if _runs(self._thread):
                before, trained = self._thread, self.handing.proven(self._turn_began)
            self._turn_began = self.handing.hand_over()
            self._follow(None if at_once else before, trained)
            return True
        self.others = True
        self._refused.add(self._here.itself)
        return False

    def _meet(self, other: ReferenceType[_Thread] | None) -> None:
        """`other`, which is not followed from now on, seems to train what the one does that is."""
        self._met = self.handing.steps
        thread = None if other is None else other()
        if thread is not None:
            self._met_with.add(thread)

    def _settle(self, steps: bool) -> None:
        """Threads that met train at once if both make a step; who lets the other make its own perhaps only looked."""
        if steps and self._here.itself in self._met_with:
            self._at_once = True
        elif self._met is not None and self.handing.proven(self._met):
            self._met = None
            self._met_with.clear()

    def _back(self) -> bool:
        """Whether the calling thread lost its turn to one that has made no step since: it perhaps only looked."""
        return self._is_here(self._before) and self._before_trained and not self.handing.proven(self._turn_began)

    def _is_here(self, thread: ReferenceType[_Thread] | None) -> bool:
        return thread is not None and thread() is self._here.itself

    def _follow(self, before: ReferenceType[_Thread] | None, trained: bool = False) -> None:
        threads = ref(self)

        def gone(thread: ReferenceType[_Thread]) -> None:
            known = threads()
            if known is not None and known._thread is thread:
                known.ident = 0

        self._before, self._thread, self.ident = before, ref(self._here.itself, gone), threading.get_ident()
        self._before_trained = trained
        self.turn += 1
        self.waits = False
        self._refused.discard(self._here.itself)
        self._met_with.discard(self._here.itself)

    @property
    def refused(self) -> bool:
        """Whether the calling thread has begun a step that is not followed."""
        return self._here.itself in self._refused

    @contextmanager
    def nothing(self) -> Iterator[None]:
        """Meanwhile nothing is heard, of any thread."""
        self.deaf += 1
        try:
            yield
        finally:
            self.deaf -= 1

    def perhaps_mine(self) -> bool:
        """The same, of what says nothing of training: it makes no thread the one."""
        return threading.get_ident() == self.ident or not self.turn

    def forked(self) -> None:
        """This is a child: whoever was about to change threads is not here to end it."""
        self._changing = threading.RLock()


def _forked() -> None:
    for threads in _EVERY:
        threads.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _runs(thread: ReferenceType[_Thread] | None) -> bool:
    return thread is not None and thread() is not None
