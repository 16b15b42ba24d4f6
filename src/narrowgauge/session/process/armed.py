"""In a process of the watched program: almost nothing from `import torch` to its first optimizer, then a session.

    import torch        module registrations are followed (`Family`), the making of optimizers is heard; no file
    first optimizer     made or unpickled: here something is trained. The run is opened and a session attached
    end of process      the session is closed, and the run with it

Workers of data loaders and compilers import torch as well and make no optimizer, or have the program's only because
they were started from its module (preparing.py). A forked child of a process that is watched goes on unwatched: the run
is its parent's.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.errors import UsageError, let_pass, worded
from narrowgauge.session.doors.compiled_calls import CompiledCalls
from narrowgauge.session.doors.unseen import unseen
from narrowgauge.session.models.family import Family
from narrowgauge.session.process.launched import rank_of_this_process, times_started_again, world_of_this_process
from narrowgauge.session.process.preparing import Prepared, preparing

_attached: list[Any] = []  # the process's session, once there is one


def arm(plan_path: str) -> None:
    """Be ready for the first optimizer of this process; the plan is read only then."""
    family, compiled = Family(), CompiledCalls()
    hook = nn.modules.module.register_module_module_registration_hook(
        lambda parent, name, child: family.registered(parent, child)
    )

    def trains(optimizers: Sequence[Optimizer]) -> None:
        if not _attached:
            hook.remove()  # the session follows registrations itself
            _attach(Path(plan_path), family, compiled, optimizers)

    prepared = Prepared(trains)

    def first(original: Callable[..., None]) -> Callable[..., None]:
        @unseen
        @functools.wraps(original)
        def run(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if _attached:
                return
            if preparing():
                prepared.keep(self)
            else:
                trains([*prepared.end(), self])

        return run

    Optimizer.__init__ = first(Optimizer.__init__)  # type: ignore[method-assign]
    Optimizer.__setstate__ = first(Optimizer.__setstate__)  # type: ignore[method-assign]


def _attach(plan_path: Path, family: Family, compiled: CompiledCalls, optimizers: Sequence[Optimizer]) -> None:
    _attached.append(None)  # whatever fails now is not tried again
    try:
        watched = Watched(plan_path, family, compiled)
    except Exception as error:
        compiled.close()
        with suppress(OSError, ValueError):  # nobody can be told
            print(f"narrowgauge: this process is not watched: {type(error).__name__}: {error}", file=sys.stderr)
        let_pass(error)
        return
    _attached[:] = [watched]
    for optimizer in optimizers:
        watched.live.session.optimizer_made(optimizer)


class Watched:
    """A session in a program that knows nothing of it: how its errors are heard."""

    def __init__(self, plan_path: Path, family: Family, compiled: CompiledCalls) -> None:
        # Imported here: a worker that only imports torch should not wait for all of this.
        from narrowgauge.session.plan import Plan
        from narrowgauge.session.process.live import Live

        if Live.current is not None:
            raise UsageError(
                f"ng.watch watches it already, into {Live.current.folder}; drop that, or `narrowgauge run`."
            )
        plan, rank = Plan.read(plan_path), rank_of_this_process()
        if again := times_started_again():  # all ranks of a start are told the same, so theirs is one run
            plan = replace(plan, out=str(plan.folder / f"restart-{again}"))
        # If another process of this program trains as well, under the same rank, its run stands there already. Ranks
        # have their launcher in common.
        aside = f"process-{os.getppid() if world_of_this_process() > 1 else os.getpid()}"
        self.live = Live(plan, rank=rank, aside=aside, family=family, compiled=compiled)
        self._excepthook = sys.excepthook
        sys.excepthook = self._failed
        if multiprocessing.parent_process() is not None:
            Finalize(None, self._ended, exitpriority=0)

    def _ended(self) -> None:
        """What a process of multiprocessing's runs has ended; an error that did it is caught behind this.

        torch's `mp.spawn` sends it to the parent, and exits.
        """
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None
        if error is not None:
            self.live.error = self.live.error or worded(error)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.live.error = worded(error)
        if self.live.open and self.live.session.roots.conversions.refused(error):
            self.live.refused = True
            print(  # a traceback would lead from the program into us, and say nothing more
                f"narrowgauge: --convert: {error} The program was ended; without --convert it is watched as it is.",
                file=sys.stderr,
            )
            return
        self._excepthook(kind, error, trace)
