"""What to keep in high precision next: a setting that this very model takes, and that leaves something in FP8.

last     where converted layers lie in more than one repeated block, and blocks stay in FP8 before those
skip     else the last converted layers by name, where others remain
recipe   else one with finer scales that did not fail beside it
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

MOST = 2  # blocks or layers at a time
WHERE = "under [convert] in the settings file given with --config"  # it has any name
FINER = {  # the nearest first
    "delayed": (("current",), ("rowwise", "blockwise")),
    "static": (("current",), ("rowwise", "blockwise")),
    "current": (("rowwise", "blockwise"),),
    "rowwise": (("blockwise",),),
}


def keep_high(rows: Sequence[Mapping[str, Any]], recipe: str, models: int = 1, failed: Collection[str] = ()) -> str:
    """The advice.

    Args:
        rows: the conversion report's; older ones do not say which block a layer is in.
        recipe: by name.
        models: how many the program has. Settings are for all of them, and so are refused by one without that name.
        failed: recipes that failed in the same comparison.
    """
    converted = [row for row in rows if row.get("recipe") and not row.get("added")]  # a name must be there at first
    if models == 1:
        held = sorted({row["block"] for row in converted if row.get("block") is not None})
        if len(held) > 1:  # what lies behind them stays high already
            blocks = next(row["blocks"] for row in converted if row.get("block") == held[-1])
            last = blocks - 1 - held[-1] + min(MOST, held[-1] - held[0])
            many = "block" if last == 1 else f"{last} blocks"
            return f"Keep the last {many} in high precision: last = {last} {WHERE}."
        if len(converted) > 1:
            return _by_name([str(row["name"]) for row in converted], any(map(_skipped, rows)))
    finer = FINER.get(recipe.removeprefix("fake-"), ())
    for level in finer:
        if left := [name for name in level if name not in failed]:
            return f"Try a finer scaling: {' or '.join(left)}."
    if finer:
        return "Leave this recipe out: finer scales failed, too, and no layer of few is left to keep high."
    return "Leave this recipe out: it has the finest scales, and no layer of few is left to keep high."


def _by_name(names: Sequence[str], more: bool) -> str:
    last = names[-min(MOST, len(names) // 2) :]
    quoted = ", ".join(f'"{name}"' for name in last)
    setting = f"add {quoted} to skip" if more else f"skip = [{quoted}]"
    return f"Keep {' and '.join(last)} in high precision{', too' if more else ''}: {setting} {WHERE}."


def _skipped(row: Mapping[str, Any]) -> bool:
    return str(row.get("reason", "")).startswith("skip=")
