"""In a process of the watched program: almost nothing from `import torch` to its first optimizer, then a session.

    import torch        module registrations are followed (`Family`), the making of optimizers is heard; no file
    first optimizer     here something is trained: the run is opened and a session attached
    end of process      the session is closed, and the run with it

Workers of data loaders and compilers import torch as well and make no optimizer. A forked child of a process that is
watched goes on unwatched: the run is its parent's.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.errors import RunError
from narrowgauge.session.compiled_calls import CompiledCalls
from narrowgauge.session.family import Family

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_attached: list[Any] = []  # the process's session, once there is one


def arm(plan_path: str) -> None:
    """Be ready for the first optimizer of this process; the plan is read only then."""
    family, compiled = Family(), CompiledCalls()
    hook = nn.modules.module.register_module_module_registration_hook(
        lambda parent, name, child: family.registered(parent, child)
    )
    original = Optimizer.__init__

    @functools.wraps(original)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not _attached:
            hook.remove()  # the session follows registrations itself
            _attach(Path(plan_path), family, compiled, self)

    Optimizer.__init__ = init  # type: ignore[method-assign]


def _attach(plan_path: Path, family: Family, compiled: CompiledCalls, optimizer: Optimizer) -> None:
    _attached.append(None)  # whatever fails now is not tried again
    try:
        watched = Watched(plan_path, family, compiled)
    except Exception as error:
        compiled.close()
        print(f"narrowgauge: this process is not watched: {type(error).__name__}: {error}", file=sys.stderr)
        return
    _attached[:] = [watched]
    watched.session.optimizer_made(optimizer)


def rank_of_this_process() -> int:
    """The rank that a launcher of several processes gave this one; 0 without a launcher.

    >>> rank_of_this_process()
    0
    """
    for name in RANKS:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


class Watched:
    """A session in a program that knows nothing of it, and what has to be done when the process ends."""

    def __init__(self, plan_path: Path, family: Family, compiled: CompiledCalls) -> None:
        # Imported here: a worker that only imports torch should not wait for all of this.
        from narrowgauge.observe.store import RunWriter
        from narrowgauge.session.attach import Session
        from narrowgauge.session.machine import machine_facts
        from narrowgauge.session.plan import Plan

        plan = Plan.read(plan_path)
        rank = rank_of_this_process()
        meta = {"command": " ".join(plan.command), "variant": plan.variant, "recipe": plan.recipe}
        self._machine = partial(machine_facts, wake=False)
        try:
            self.writer = RunWriter(plan.folder, meta | self._machine(), rank=rank)
        except RunError:
            # Another process of this program trains as well, under the same rank: its run stands there already.
            self.writer = RunWriter(plan.folder / f"process-{os.getpid()}", meta | self._machine(), rank=rank)
        self.session = Session(plan, self.writer, family=family, compiled=compiled)
        self.error = ""
        self._pid = os.getpid()
        self._excepthook = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.error = f"{kind.__name__}: {error}"
        self._excepthook(kind, error, trace)

    def _forked(self) -> None:
        if _attached == [self]:
            self.session.abandon()

    def close(self) -> None:
        """Write everything and end the run; what was recorded is kept whatever happens here."""
        if os.getpid() != self._pid:
            return
        try:
            self.session.finish()
            facts = self._machine() | self.session.facts()  # a GPU may have been woken since
        except Exception as raised:
            facts = {"notes": [f"closing the run failed: {raised!r}"]}
        self.writer.update_meta(**facts, error=self.error)
        self.writer.close("failed" if self.error else "complete")
        # torch and the interpreter hold on to this object; duckdb's bindings complain of what lives longer than they.
        del self.session, self.writer
        _attached[:] = [None]


def watched() -> bool:
    """Whether this process has a session."""
    return bool(_attached and _attached[0] is not None)
