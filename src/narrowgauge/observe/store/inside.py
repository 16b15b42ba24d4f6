"""Runs inside of a run's folder: of processes that began to train when it was taken, and of what was started again."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.metrics.site import natural
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.schema import KINDS

INSIDE = ("process", "restart")  # what their names begin with


def folders_inside(folder: Path) -> list[Path]:
    """Those that may hold one, by kind and number."""
    return sorted(
        (path for kind in INSIDE for path in folder.glob(f"{kind}-*") if path.is_dir()), key=lambda p: natural(p.name)
    )


def runs_inside(folder: Path) -> list[str]:
    """The names of those in which something was recorded."""
    return [path.name for path in folders_inside(folder) if manifests.ranks(path)]


def written(folder: Path) -> list[Path]:
    """The files of rows that a run has, of all ranks."""
    return [path for kind in KINDS for path in (folder / kind).glob("rank*.parquet")]
