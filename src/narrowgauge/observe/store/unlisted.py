"""A thread of ours beside a program's, which `threading` does not list.

Programs wait for their threads by `for t in threading.enumerate(): t.join()`, or until `active_count()` is 1. They
would wait for one of ours for ever, since it ends with the program. Python ends it as a daemon.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable


class UnlistedThread:
    """Runs `run` from now on. A forked child has none."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._pid = run, os.getpid()
        self._ended = threading.Event()
        self._ident = _thread.start_new_thread(self._all, ())

    def _all(self) -> None:
        try:
            self._run()
        finally:
            unlist()
            self._ended.set()

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return os.getpid() == self._pid and not self._ended.is_set()

    def is_this(self) -> bool:
        """Whether it is the calling thread."""
        return threading.get_ident() == self._ident

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for so many seconds at most."""
        if self.is_alive():
            self._ended.wait(timeout)


def unlist() -> None:
    """For the calling thread, which is listed once anything in it has asked for it, as logging does."""
    active, ident = threading._active, threading.get_ident()  # type: ignore[attr-defined]
    if isinstance(active.get(ident), threading._DummyThread):
        del active[ident]
