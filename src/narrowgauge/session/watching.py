"""`ng.watch`: a session in the running process, for notebooks and scripts, as `narrowgauge run` has it from outside.

    with ng.watch(model, out="runs/a", every=20):
        train(model)

    watching = ng.watch(model, out="runs/a")      the same without a block
    ...
    watching.close()                              or at the end of the process

The model and its optimizers may have been made before. What happens outside of it is not heard.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from narrowgauge.errors import RunError, UsageError, worded
from narrowgauge.observe.export import check
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.session.config import load
from narrowgauge.session.doors import deepspeed
from narrowgauge.session.doors.compiled_calls import CompiledCalls
from narrowgauge.session.folder import named, prepare
from narrowgauge.session.models.family import Family, parts
from narrowgauge.session.plan import Plan
from narrowgauge.session.process.exporting import exporting
from narrowgauge.session.process.launched import rank_of_this_process
from narrowgauge.session.process.live import Live
from narrowgauge.session.selection.unmet import NOT_FOUND

_log = logging.getLogger("narrowgauge.session")
_beginning = threading.RLock()  # of several threads that begin one, all but the first are refused
_begins: list[None] = []  # one does


class Watching:
    """What is being watched; a context manager that ends it."""

    def __init__(self, live: Live) -> None:
        self._live = live

    @property
    def folder(self) -> Path:
        """The run's folder, for `ng.open_run`: some 10 seconds late while it is watched, whole when that has ended."""
        return self._live.folder

    def close(self) -> None:
        """End it: the run is written to its end, and the program has no hook of ours any more. Twice is harmless."""
        self._live.close()

    def __enter__(self) -> Watching:
        if not self._live.open:
            raise UsageError(f"the watch into {self.folder} has ended; call ng.watch again, with another folder.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = kind is not None and (
            issubclass(kind, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
        )
        if error is not None and not left and self._live.open:
            self._live.error = worded(error)
        self.close()

    def __repr__(self) -> str:
        return f"<narrowgauge watch into {self.folder}{'' if self._live.open else ', ended'}>"


def watch(
    model: nn.Module | None = None,
    out: str | os.PathLike[str] = "runs/watch",
    *,
    every: int | None = None,
    config: str | os.PathLike[str] | None = None,
) -> Watching:
    """Watch what this process trains, until the end of a `with` block, of `close()`, or of the process.

    Args:
        model: whose training to watch; without one, everything that trains.
        out: the folder of the run: a new or an empty one.
        every: record tensors every so many steps (default: the configuration's, which is 10).
        config: a `narrowgauge.toml`.

    Returns:
        What is watched, with its `folder` and `close()`; a context manager. Outside of a `with`, keep it: nothing
        else can end the watch before the process does. An error that leaves the block is kept in the run, and goes on.

    Raises:
        UsageError: this process is watched already; the folder is not empty or cannot be written; `every` is no
            whole number from 1 on; `model` is no module; something is wrong with the configuration.
        RunError: another process of the same rank writes into the folder.
    """
    with _beginning:
        if _begins:
            raise UsageError(
                "this process is about to be watched: a signal's handler called ng.watch inside of ng.watch."
            )
        _begins.append(None)
        try:
            return _begin(model, out, every, config)
        finally:
            _begins.clear()


def _no_model(given: object) -> str:
    folder = " The run's folder is out=..." if isinstance(given, str | os.PathLike) else ""
    return f"ng.watch got a {type(given).__name__} as the model; expected a torch.nn.Module or nothing.{folder}"


def _begin(
    model: nn.Module | None, out: str | os.PathLike[str], every: int | None, config: str | os.PathLike[str] | None
) -> Watching:
    if Live.current is not None:
        raise UsageError(
            f"this process is watched already, into {Live.current.folder}: one watch at a time. Leave its `with` block "
            "or close() it first; under `narrowgauge run`, drop ng.watch."
        )
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(_no_model(model))
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise UsageError(f"every is {every!r}; expected a whole number: 1 (every step) or more.")
    if config is not None and (not isinstance(config, str | os.PathLike) or not os.fspath(config)):
        what = repr(config) if isinstance(config, str) else f"a {type(config).__name__}"
        raise UsageError(f"ng.watch got {what} as config=; expected the path of a narrowgauge.toml, or nothing.")
    settings = load(None if config is None else Path(config))
    check(settings.for_watching()["export"])
    folder = named(out, "as out=")
    rank, alone = _rank()
    if alone:
        prepare(folder, "as out=")  # of several ranks one would find the other's files
    plan = Plan(
        variant="asis",
        out=str(folder),
        command=("ng.watch",),
        compiling=True,
        **{**settings.for_watching(), **({"every": every} if every else {})},
    )
    compiled, family = CompiledCalls(), Family()
    try:
        live = Live(plan, rank=rank, family=family, compiled=compiled, only=model)
    except BaseException:
        compiled.close()
        raise
    last = live.ending.enter_context(ExitStack())  # closed behind the trackers
    trackers: list[str] = []
    if plan.export and rank == 0:
        trackers = live.ending.enter_context(exporting(plan.folder, plan.export))
    try:
        _catch_up(live, family, compiled, model)
        live.session.ledger.ready()
    except BaseException as raised:
        live.error = repr(raised)
        live.close()  # or no other watch could begin
        raise
    if rank == 0:
        last.callback(_tell, live.folder, config, trackers, alone=alone)
    return Watching(live)


def _tell(folder: Path, config: str | os.PathLike[str] | None, trackers: Sequence[str], *, alone: bool) -> None:
    """What the command says at its end: what settings asked in vain, and what was not found or not recorded.

    Of a glob that nothing matched only a rank that is `alone` can tell: others may have what it names. Why a run was
    stopped, and what of it is missing since, was told when it was.
    """
    facts: dict[str, Any] = {}
    with suppress(OSError, ValueError, RunError):
        manifest = manifests.read(folder)
        facts = {} if manifests.status(manifest) == "stopped" else manifest.get("meta") or {}
    unmet = [told for told in facts.get("unmet") or () if alone or not any(words in told for words in NOT_FOUND)]
    few = [facts["unrecorded"]] if facts.get("unrecorded") else []
    prefix = "" if config is None else f"{os.fspath(config)}: "
    for said in (*(f"{prefix}{told}" for told in unmet), *(facts.get("not_found") or ()), *few, *trackers):
        _log.warning("narrowgauge: %s", said)


def _catch_up(live: Live, family: Family, compiled: CompiledCalls, model: nn.Module | None) -> None:
    """What a session hears as it is made, of what was made before."""
    made = gc.get_objects()
    found = _kind(made, (nn.Module, Optimizer))  # all of them once: there are hundreds of thousands
    every = _kind(found, nn.Module)
    modules = every if model is None else list(model.modules())
    for module in modules:
        for child in parts(module):
            family.registered(module, child)
        compiled.adopt(module)
    for module in () if model is None else every:  # what `torch.compile` made of the one that was given
        if any(vars(module).get("_modules", {}).get("_orig_mod") is part for part in modules):
            compiled.adopt(module)
    parameters = deepspeed.made_with(made)
    for optimizer in _kind(found, Optimizer):
        live.session.optimizer_made(optimizer, parameters.get(id(optimizer)))


def _kind(objects: list[Any], kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
    # An object may answer isinstance with something of its own; its type does not.
    return [x for x in objects if issubclass(type(x), kind)]


def _rank() -> tuple[int, bool]:
    """This process's rank, and whether it is the only one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size() == 1
    rank = rank_of_this_process()
    return rank, rank == 0 and os.environ.get("WORLD_SIZE", "1") == "1"
