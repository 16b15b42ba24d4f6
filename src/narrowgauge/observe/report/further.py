"""Runs inside of a run's folder: a page is of the run alone, and says how they are opened."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.observe.report import words
from narrowgauge.observe.store.inside import INSIDE, runs_inside

MOST = 3  # that are named


def further(folder: Path, shown: str = "FOLDER") -> str:
    """One sentence, with the folder as `shown`; "" where there are none.

    A page says no path of the machine that made it.
    """
    names = runs_inside(folder)
    if not names:
        return ""
    if len(names) <= MOST:
        listed, paths = words.listing(names), [f"{shown}/{name}" for name in names]
    else:
        listed = f"{', '.join(names[:MOST])} and {len(names) - MOST} more"
        paths = [f"{shown}/{kind}-*" for kind in INSIDE if any(name.startswith(kind) for name in names)]
    many = "1 further run is" if len(names) == 1 else f"{len(names)} further runs are"
    them = "it" if len(names) == 1 else "them"
    return f"{many} inside of this run's folder: {listed}. To open {them}: narrowgauge report {' '.join(paths)}"
