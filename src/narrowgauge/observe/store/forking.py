"""A fork waits until no writer of this process is inside of DuckDB, for half a second at most.

    writer thread    make metrics        with GATE.inside(): open DuckDB, write, close it
    os.fork          before: wait until nobody is inside, and let nobody in        after: let them in

A child that got DuckDB open has no thread that could close it, and its bindings say so on the child's stderr when it
ends. Forks are heard wherever they come from: os.fork, multiprocessing, workers of data loaders. What a signal handler
raises while one waits (Ctrl-C), Python prints and ignores, as in all that is called at a fork.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

PATIENCE = 0.5  # seconds; a segment takes a tenth or two, and one that takes longer is waited for only once


class Gate:
    """Which threads are inside; forks of other threads wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: set[int] = set()
        self._forks = 0  # that wait; a thread that leaves and enters again at once would not let them through
        self._in_vain: set[int] = set()  # those for which a fork has waited long enough

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is, in this block. Not to be nested."""
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._inside.add(thread)
        try:
            yield
        finally:
            with self._changed:
                self._inside.discard(thread)
                self._in_vain.discard(thread)
                self._changed.notify_all()

    def before_fork(self) -> None:
        """Wait, and keep all others out."""
        if not self._changed.acquire(timeout=PATIENCE):
            return
        self._forks += 1
        try:
            if not self._changed.wait_for(lambda: not self._awaited(), PATIENCE):
                self._in_vain |= self._awaited()
        finally:
            self._forks -= 1
            self._changed.notify_all()  # of those that will be let in

    def after_in_parent(self) -> None:
        """Let them in."""
        with contextlib.suppress(RuntimeError):  # it was not to be had
            self._changed.release()

    def after_in_child(self) -> None:
        """Nobody is inside."""
        Gate.__init__(self)

    def _awaited(self) -> set[int]:
        return self._inside - self._in_vain - {threading.get_ident()}


GATE = Gate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=GATE.before_fork, after_in_parent=GATE.after_in_parent, after_in_child=GATE.after_in_child
    )
