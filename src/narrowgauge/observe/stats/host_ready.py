"""Is the compiled walk there? numba takes seconds to compile it, once per machine and version; nobody trains meanwhile.

    prepare()    as a recorded step begins    in numba's cache: loaded     else: a process is started that compiles it
    ready()      for each tensor              whether it may be called; until then the passes of `tally` count
    wait()       where waiting is right       compiled in this process

The process ends with this one and is none of its children, and what it wrote is numba's cache: beside the code, in the
user's folder, or where NUMBA_CACHE_DIR says; where none of them can be written to, in one temporary folder per user. A
fork starts anew.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType
from typing import Any

from narrowgauge.errors import let_pass
from narrowgauge.observe.stats import host_compile
from narrowgauge.observe.stats.apart import Apart
from narrowgauge.observe.stats.host_compile import NotCachedError, alone, cached_only, call_all

_log = logging.getLogger("narrowgauge.stats")


class Walk:
    """The compiled walk of this process, on its way.

    Attributes:
        loaded: whether it may be called.
        failed: whether it never will be.
        why: the reason, in words; "" unless it failed.
        process: what compiles it.
        beside: the thread that does, where no process could.
    """

    def __init__(self) -> None:
        self.loaded, self.failed = False, False
        self.why = ""
        self.process: Apart | None = None
        self.beside: threading.Thread | None = None
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def prepare(self) -> bool:
        """Load it if it is compiled, else have it compiled; whether it is ready. Never waits for a compiler."""
        if self.loaded or self.failed or self.beside is not None:
            return self.loaded
        if self.process is not None and self.process.running():
            return False
        if not self._lock.acquire(blocking=False):  # another thread loads it
            return False
        try:
            self._load(cached_only)
        except NotCachedError:
            try:
                self._start()
            except (OSError, ValueError):  # no other process to be had, or it could not
                self._start_beside()
        finally:
            self._lock.release()
        return self.loaded

    def wait(self) -> bool:
        """Load or compile it here and now; whether there is one."""
        with self._lock:
            if not (self.loaded or self.failed):
                self._load(alone)
            return self.loaded

    def _load(self, way: Callable[[ModuleType], AbstractContextManager[None]]) -> None:
        try:
            walk = kernel()
            if walk is None:
                raise ImportError(_absent[-1])
            with way(walk):
                call_all(walk)
            self.loaded = True
        except NotCachedError:
            raise
        except Exception as error:  # a compiler has many ways to fail, and training is not to feel any
            let_pass(error)
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            self._give_up(f"cannot be compiled ({cause})")
            _log.warning("narrowgauge: %s", self.why)

    def _give_up(self, why: str) -> None:
        self.failed = True
        self.why = f"The watch's fast walk {why}; slower passes take its place."

    def _start(self) -> None:
        if self.process is not None:
            raise OSError("the process that compiles ended, and nothing is there")
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("what runs this is no Python that could run another file")
        environment = os.environ | cache_of_ours()
        environment.pop("NARROWGAUGE_PLAN", None)
        self.process = Apart([sys.executable, "-P", host_compile.__file__], environment)
        atexit.register(self.stop)

    def _start_beside(self) -> None:
        beside = threading.Thread(target=self.wait, daemon=True)
        try:
            beside.start()
        except RuntimeError:  # no thread either, or the interpreter ends
            self._give_up("was not compiled (no process and no thread could be started)")
            return
        self.beside = beside

    def stop(self) -> None:
        """End the process that compiles, if there is one."""
        if self.process is not None:
            self.process.stop()
            self.process = None

    def _forked(self) -> None:
        """In a fork: the process is the parent's, and is to end with that."""
        self._lock, self.beside = threading.Lock(), None
        if self.process is not None:
            self.process.let_go()
            self.process = None


WALK = Walk()


def ready() -> bool:
    """Whether the compiled walk may be called."""
    return WALK.loaded


def prepare() -> bool:
    """See to it that the compiled walk will be ready, without waiting for a compiler; whether it is."""
    return WALK.prepare()


def why_not() -> str:
    """Why there will be no compiled walk; "" if nobody asked, or it may still come."""
    return WALK.why


def wait() -> bool:
    """Load the compiled walk, or compile it; whether there is one."""
    return WALK.wait()


@cache
def kernel() -> ModuleType | None:
    """The walk's module, None where numba is missing, has no build for this machine, or refuses its numpy."""
    try:
        import numba

        try:
            from narrowgauge.observe.stats import host_kernel
        except RuntimeError:  # no folder for a cache can be written to
            settings: Any = numba.config
            before, settings.CACHE_DIR = settings.CACHE_DIR, _temporary()
            try:
                from narrowgauge.observe.stats import host_kernel
            finally:
                settings.CACHE_DIR = before
    except ImportError as error:
        _absent.append(str(error))
        return None
    return host_kernel


_absent: list[str] = []  # why there is no module


def cache_of_ours() -> dict[str, str]:
    """What tells numba in another process of the temporary cache, if there is one."""
    return {"NUMBA_CACHE_DIR": _temporary()} if _temporary.cache_info().currsize else {}


@cache
def _temporary() -> str:
    """One folder per user: what is compiled there is found again, and killed programs leave no more than that."""
    with contextlib.suppress(OSError, AttributeError):  # a system without users
        owner = os.geteuid()
        folder = os.path.join(tempfile.gettempdir(), f"narrowgauge-cache-{owner}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        # Code is loaded from it: nobody else may have put something there.
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & 0o077
        if own and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return _passing()


def _passing() -> str:
    """A folder that goes with this process, unless it is killed."""
    folder, owner = tempfile.mkdtemp(prefix="narrowgauge-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)

    atexit.register(remove)
    return folder
