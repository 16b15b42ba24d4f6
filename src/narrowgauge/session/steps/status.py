"""A run's pulse: one small file, rewritten twice a second, that a progress display can read at any time."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.session.plan import STATUS_FILE, Plan

if TYPE_CHECKING:  # it loads torch, which the process that only reads a status has no need of
    from narrowgauge.session.steps.ledger import Ledger

INTERVAL = 0.5  # seconds; on some disks a write takes a millisecond
_last_write = [0.0]


@dataclass(frozen=True)
class Status:
    """Where a run stands; `total` is None while nobody knows."""

    step: int = 0
    total: int | None = None
    loss: float = float("nan")
    done: bool = False


def report(plan: Plan, ledger: Ledger, *, done: bool = False) -> None:
    """Rewrite the run's status, at most every INTERVAL seconds (always when `done`)."""
    now = time.monotonic()
    if not done and now - _last_write[0] < INTERVAL:
        return
    _last_write[0] = now
    path = plan.folder / STATUS_FILE
    aside = path.with_suffix(f".{os.getpid()}")
    row = {"step": ledger.steps, "total": plan.steps, "loss": ledger.rows.last_loss, "done": done}
    try:
        aside.write_text(json.dumps(row))
        aside.replace(path)
    except OSError:
        return  # a full disk is told once, by the run's writer


def read(plan: Plan) -> Status:
    """The last status that was written; an empty one before the first."""
    try:
        return Status(**json.loads((plan.folder / STATUS_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return Status()
