"""Runs inside of a run's folder: of processes that began to train when it was taken, and of what was started again."""

from __future__ import annotations

import re
from pathlib import Path

from narrowgauge.observe.store import manifest as manifests

INSIDE = ("process", "restart")  # what their names begin with


def folders_inside(folder: Path) -> list[Path]:
    """Those that may hold one, by kind and number."""
    found = {path for kind in INSIDE for path in folder.glob(f"{kind}-*") if path.is_dir()}
    return sorted(
        found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"\W", path.name)]
    )


def runs_inside(folder: Path) -> list[str]:
    """The names of those in which something was recorded."""
    return [path.name for path in folders_inside(folder) if manifests.ranks(path)]
