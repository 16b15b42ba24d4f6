"""Claiming a run folder: one writer per rank, and never a second run over a first.

The claim is run.json itself, made by a call that fails if it exists; there is no lock that a killed process
could leave behind. A folder that holds a run is taken only by `resume`, once its last writer is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.errors import RunError
from narrowgauge.observe.store import manifest as manifests
from narrowgauge.observe.store.schema import KINDS, Kind, Segment


def claim(path: Path, meta: dict[str, Any], rank: int, resume: bool) -> tuple[manifests.Manifest, dict[Kind, int]]:
    """Claim the folder for one rank: its manifest and the next segment index of each kind."""
    try:
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; expected a folder to write a run into. Choose another path.")
        path.mkdir(parents=True, exist_ok=True)
        indices = {kind: _next_index(path / kind, rank) for kind in KINDS}
        held = (path / manifests.name(rank)).exists() or any(indices.values())
        if held and not resume:
            raise RunError(
                f"{path} already holds a run. Choose another folder, remove it, or continue it: resume=True."
            )
        manifest = manifests.fresh(rank, meta)
        if held:
            earlier = _earlier(path, rank)
            manifest["attempt"] = int(earlier.get("attempt", 0)) + 1
            manifest["started"] = earlier.get("started", manifest["started"])
            manifest["meta"] = {**earlier.get("meta", {}), **meta}
            _sweep(path, rank)
        manifests.write(path, manifest, exclusive=not held)
    except FileExistsError as error:
        raise RunError(f"{path}: another process just began a run here. Give each run its own folder.") from error
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror or error}). Make room, make it writable, or choose "
            "another folder."
        ) from error
    return manifest, indices


def _earlier(path: Path, rank: int) -> manifests.Manifest:
    """The manifest of the run that is resumed; empty if it was lost."""
    try:
        earlier = manifests.read(path, rank)
    except FileNotFoundError:
        return {}
    if earlier["status"] == "running" and manifests.is_alive(earlier):
        pid = earlier["process"]["pid"]
        raise RunError(f"{path} is still being written by process {pid}. Stop it first, or choose another folder.")
    return earlier


def _next_index(folder: Path, rank: int) -> int:
    names = folder.iterdir() if folder.is_dir() else ()
    segments = (Segment.parse(entry.name) for entry in names)
    return max((segment.last + 1 for segment in segments if segment and segment.rank == rank), default=0)


def _sweep(path: Path, rank: int) -> None:
    """Remove what an earlier, killed writer of this rank left half written."""
    for kind in KINDS:
        for half in (path / kind).glob(f".rank{rank}-*"):
            half.unlink(missing_ok=True)
