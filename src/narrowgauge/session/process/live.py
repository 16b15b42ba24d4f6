"""A run that this process is writing, with the session that writes it, from opening to close.

    end of the process     closed; the status says whether an error ended it
    os._exit               closed first, within PATIENCE seconds: nothing else would run at such an end
    kill -9                what the writer has written until then stays readable
    fork                   the child goes on unwatched: the run is its parent's

A process has one at a time: `Live.current`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import ref

from narrowgauge.errors import RunError, let_pass, worded
from narrowgauge.observe.store import RunWriter
from narrowgauge.session.attach import Session
from narrowgauge.session.machine import device_facts, machine_facts
from narrowgauge.session.plan import Plan
from narrowgauge.session.process.launched import world_of_this_process

PATIENCE = 5.0  # seconds
MOST = 1000  # runs of one name in a folder


class Live:
    """An open run and its session.

    Args:
        plan: what to do; its folder is taken as it is.
        rank: this process's among those that train together.
        aside: the name of a folder inside of the plan's to use if that is taken, with a number behind it if that is
            taken as well; RunError without.
        session: further arguments of the session.
    """

    current: ClassVar[Live | None] = None

    def __init__(self, plan: Plan, *, rank: int = 0, aside: str = "", **session: Any) -> None:
        meta: dict[str, Any] = {"command": " ".join(plan.command), "variant": plan.variant, "recipe": plan.recipe}
        meta |= machine_facts(wake=False) | {"judged_by": plan.judge}
        if plan.what_if:  # should the run be killed: what it asked
            meta["watch"] = {"every": plan.every, "what_if": {"recipes": list(plan.what_if)}}
        if (world := world_of_this_process()) > 1:  # should the run be killed: who else was to write
            meta["ranks"] = {"world": world}
        self.writer = _writer(plan.folder, meta, rank, aside)
        self.folder = self.writer.path
        self.session = Session(replace(plan, out=str(self.folder)), self.writer, **session)
        self.error = ""
        self.refused = False  # the program was ended, because what --convert asked cannot be done
        self.ending = ExitStack()  # what else has to be closed, after the run
        self._pid = os.getpid()
        # Threads that close it wait for the one that does; a signal's handler that comes into that one need not do it.
        self._closing, self._closes = threading.RLock(), threading.Lock()
        Live.current = self
        atexit.register(self._at_exit)
        self._follow_exit()
        if hasattr(os, "register_at_fork"):
            known = ref(self)
            os.register_at_fork(after_in_child=partial(_forked, known), after_in_parent=partial(_forks, known))

    @property
    def open(self) -> bool:
        """Whether it is still written."""
        return Live.current is self

    def close(self) -> None:
        """Write everything and end the run; what was recorded is kept whatever happens here.

        What a signal handler of the program raises meanwhile, a time limit say, goes on when all is closed.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            if not self.open or not self._closes.acquire(blocking=False):
                return
            Live.current = None
            self._restore_exit()
            atexit.unregister(self._at_exit)
            facts, failed = self._finish()
            if self.refused:  # whatever is missing, that is why
                facts |= {"refused": True, "not_found": []}
            self.writer.update_meta(**facts, error=self.error)
            status = "failed" if self.error else "complete"
            try:
                self.writer.close(status)
            except BaseException as raised:
                failed = failed or raised
                self.writer.close(status)  # its thread would go on while the interpreter ends, which aborts
            # torch and the interpreter hold on to this object; duckdb's bindings complain of what outlives them.
            del self.session, self.writer
        self.ending.close()
        if failed is not None and not isinstance(failed, Exception):
            raise failed
        if failed is not None:
            let_pass(failed)

    def _finish(self) -> tuple[dict[str, Any], BaseException | None]:
        """Close the session; what is known of the run, and what failed: of several things, the first."""
        facts: dict[str, Any] = {}
        failed: BaseException | None = None
        closes: tuple[Callable[[], object], ...] = (
            lambda: self.session.finish(failed=bool(self.error)),
            lambda: self.session.abandon(),  # whatever failed, the program has no hook of ours any more
            lambda: facts.update(device_facts(wake=False), **self.session.facts()),  # a GPU may have been woken since
        )
        for close in closes:
            try:
                close()
            except BaseException as raised:  # a handler's SystemExit as well
                failed = failed or raised
        if failed is not None:
            facts["notes"] = [*facts.get("notes", ()), f"closing the run failed: {failed!r}"]
        return facts, failed

    def forked(self) -> None:
        """This is a child: hear nothing any more."""
        if self.open:
            Live.current = None
            self._restore_exit()
            self.session.abandon()

    def _at_exit(self) -> None:
        """The interpreter ends. An error that ended it is not told where the program has an excepthook of its own."""
        last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a prompt has any number of errors
        if last is not None:
            self.error = self.error or worded(last)
        self.close()

    def _follow_exit(self) -> None:
        self._exit = os._exit
        known, original = ref(self), os._exit

        def leave(status: int) -> None:
            live = known()
            if live is not None and live.open and os.getpid() == live._pid:
                live.error = live.error or (f"os._exit({status})" if status else "")
                # A device that hangs may be why the program leaves like this: it must not hold it up.
                closing = threading.Thread(target=live.close, daemon=True)
                closing.start()
                closing.join(PATIENCE)
            original(status)

        leave.__module__, leave.__qualname__ = "os", "_exit"  # by which a pickle finds it, of a child's target say
        self._leave = os._exit = leave  # type: ignore[assignment]

    def _restore_exit(self) -> None:
        if os._exit is self._leave:  # unless somebody else has wrapped it since
            os._exit = self._exit


def _writer(folder: Path, meta: dict[str, Any], rank: int, aside: str) -> RunWriter:
    """A writer into the folder, or into the first one inside of it that no process of this rank has written to."""
    names = ("", aside, *(f"{aside}-{number}" for number in range(2, MOST))) if aside else ("",)
    for name in names:
        try:
            return RunWriter(folder / name, meta, rank=rank)
        except RunError as error:
            taken = error.__cause__ is None or isinstance(error.__cause__, FileExistsError)
            if not taken or name == names[-1]:
                raise
    raise AssertionError("there is at least one name")


def _forked(known: ref[Live]) -> None:
    live = known()
    if live is not None:
        live.forked()


def _forks(known: ref[Live]) -> None:
    live = known()
    if live is not None and live.open:
        live.session.forks += 1
