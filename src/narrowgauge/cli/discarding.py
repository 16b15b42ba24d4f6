"""What is not kept of a command that failed, so that it can be tried again with the same --out."""

from __future__ import annotations

import contextlib
from pathlib import Path

from narrowgauge.cli.outcome import facts_of


def discard(folder: Path) -> None:
    """Leave nothing of a command that failed before anything was recorded."""
    with contextlib.suppress(OSError):
        if set(folder.iterdir()) <= set(_beside_the_run(folder)):
            _remove(folder)


def take_back(folder: Path) -> str:
    """Remove a run that was ended because nothing could be converted, if nobody trained; "" of any other.

    Those inside of it are its further attempts, or of processes beside it: all or none.
    """
    from narrowgauge.observe.store.inside import folders_inside

    runs = [*folders_inside(folder), folder]
    if not all(map(_refused, runs)):
        return ""
    with contextlib.suppress(OSError):
        for run in runs:
            _clear(run)
            _remove(run)
    left = f"other files are left in {folder}" if folder.exists() else f"{folder} can be used again"
    return f"nothing was trained, so there is no run; {left}"


def _refused(folder: Path) -> bool:
    """Whether a rank was ended because of it, and none has a step, or anything without saying how it ended."""
    from narrowgauge.observe.store import manifest as manifests
    from narrowgauge.observe.store.inside import written
    from narrowgauge.observe.store.schema import Segment

    facts = {rank: facts_of(folder / manifests.name(rank)) for rank in manifests.ranks(folder)}
    refused = {rank for rank, its in facts.items() if its.get("refused")}
    wrote = {segment.rank for path in written(folder) if (segment := Segment.parse(path.name))}
    return bool(refused) and wrote <= refused and not any(its.get("steps") for its in facts.values())


def _clear(folder: Path) -> None:
    from narrowgauge.observe.store import manifest as manifests
    from narrowgauge.observe.store.inside import written
    from narrowgauge.observe.store.schema import KINDS

    for path in (*written(folder), *(folder / manifests.name(rank) for rank in manifests.ranks(folder))):
        path.unlink()
    for kind in KINDS:
        if (folder / kind).is_dir():
            (folder / kind).rmdir()


def _beside_the_run(folder: Path) -> list[Path]:
    from narrowgauge.session.plan import PLAN_FILE
    from narrowgauge.session.process.exporting import LOG, REPORT

    return [folder / name for name in (PLAN_FILE, LOG, REPORT)]


def _remove(folder: Path) -> None:
    for path in _beside_the_run(folder):
        path.unlink(missing_ok=True)
    folder.rmdir()
