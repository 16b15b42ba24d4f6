"""What came of a program that `narrowgauge run` watched, in sentences for its end, read from the run's folder."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

from narrowgauge.errors import RunError

INSIDE = ("process", "restart")  # what folders of further runs begin with


def not_found(folder: Path) -> list[str]:
    """What a program that trains has and no rank found, in the words of the first: the loss may be another stage's."""
    first, *others = [facts.get("not_found") for facts in _of_ranks(folder)] or [None]
    # A rank that ended without a word says nothing.
    also = [{_what(missing) for missing in found} for found in others if found is not None]
    return [missing for missing in first or () if all(_what(missing) in found for found in also)]


def _what(missing: str) -> str:
    return str(missing).partition(":")[0]


def unrecorded(folder: Path) -> list[str]:
    """That a program ended before its first recorded step, in one sentence; none if it did not."""
    return [str(facts["unrecorded"]) for facts in _of_ranks(folder)[:1] if facts.get("unrecorded")]


def unended(folder: Path, code: int) -> list[str]:
    """Which ranks of the run, and of those inside of it, did not come to their end; none where there is one rank.

    Where that cannot be read although somebody wrote there, why.
    """
    from narrowgauge.observe.store import manifest as manifests
    from narrowgauge.observe.store import open_run

    told = []
    for path in (folder, *sorted(path for name in INSIDE for path in folder.glob(f"{name}-*"))):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it would say that rank 0's part is missing, as is said below
                ends = open_run(path).ends
        except RunError as error:
            told += [str(error)] if manifests.ranks(path) else []
            continue
        # A rank that makes no optimizer records nothing, and that is no news where all went well, unless it is the
        # one whose part is looked at first.
        if ends.words and (ends.unended or (ends.missing and code) or 0 in ends.missing):
            told.append(f"{'' if path == folder else f'{path.name}: '}{ends.words}; what was written is kept.")
    return told


def _of_ranks(folder: Path) -> list[dict[str, Any]]:
    """What the session of each rank that has a part here learned."""
    from narrowgauge.observe.store import manifest as manifests

    return [_facts(folder / manifests.name(rank)) for rank in manifests.ranks(folder)]


def _facts(manifest: Path) -> dict[str, Any]:
    """What one rank's session learned; nothing without."""
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
        return dict(json.loads(manifest.read_text())["meta"])
    return {}


def what_came_of_it(folder: Path, code: int) -> str:
    """Where the run is; or that there is none, and why that may be."""
    if not folder.exists():  # it held at least the plan
        return f"{folder} was removed while the command ran, and what was recorded with it."
    inside = sorted({path.parent.name for name in INSIDE for path in folder.glob(f"{name}-*/run*.json")})
    if _of_ranks(folder):
        more = f"; inside of it are those of processes that began later: {', '.join(inside)}" if inside else ""
        return f"the run is in {folder}{more}"
    if inside:
        return f"the run is in {', '.join(str(folder / name) for name in inside)}"
    nothing = "nothing was watched: no Python process below this command made a torch.optim optimizer"
    if code:
        from narrowgauge.session.process.launch import describe_code

        return f"{nothing} before the command ended ({describe_code(code)})."
    return (
        f"{nothing}. A program that starts Python with -I, -E or -S, or in a container or on another machine, cannot "
        "be followed from here."
    )


def discard(folder: Path) -> None:
    """Leave nothing of a command that failed before anything was recorded: it is tried again, with the same --out."""
    from narrowgauge.session.plan import PLAN_FILE
    from narrowgauge.session.process.exporting import LOG, REPORT

    with contextlib.suppress(OSError):
        ours = list(folder.iterdir())
        if {entry.name for entry in ours} <= {PLAN_FILE, LOG, REPORT}:
            for entry in ours:
                entry.unlink()
            folder.rmdir()
