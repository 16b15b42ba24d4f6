"""The whole verdict in one sentence, and one more on speed."""

from __future__ import annotations

from itertools import groupby

from narrowgauge.observe.report import words
from narrowgauge.observe.verdict.types import Verdict

OUTCOMES = {
    "pass": ("✓", "pass"),
    "watch": ("!", "watch"),
    "fail": ("✕", "fail"),
    "inconclusive": ("?", "inconclusive"),
    "unjudged": ("–", "not judged"),
}
ANSWERS = {"yes": "yes", "no": "no", "unknown": "not known yet"}
_ORDER = {"yes": 0, "no": 1, "unknown": 2}


def headline(verdict: Verdict) -> list[tuple[str, str]]:
    """Who is safe, who is not, who is undecided, as (text, variant's name or "") parts: names can take their colour."""
    if not verdict.variants:
        return [("No FP8 variant was run.", "")]
    if not verdict.judged:
        return [("Nothing was judged.", "")]
    parts: list[tuple[str, str]] = []
    ranked = sorted(verdict.variants, key=lambda v: _ORDER[v.safe])
    for safe, group in groupby(ranked, key=lambda v: v.safe):
        names = [v.name for v in group]
        if parts:
            parts.append(("; ", ""))
        for i, name in enumerate(names):
            if i:
                parts.append((" and " if i == len(names) - 1 else ", ", ""))
            parts.append((name, name))
        verb = " is " if len(names) == 1 else " are "
        # "a is safe; b is not": the second claim leans on the first.
        no = "not" if ranked[0].safe == "yes" else "not safe"
        parts.append((verb + {"yes": "safe", "no": no, "unknown": "undecided"}[safe], ""))
    return [*parts, (".", "")]


def speed_line(verdict: Verdict) -> str:
    """Who is worth it, or why that cannot be said."""
    none = bool(verdict.variants) and all(v.worth_it == "no" for v in verdict.variants)
    if verdict.emulated and none:
        return (
            "None is worth it here: none is safe. FP8 products were emulated on this machine, so their speed says "
            "nothing."
        )
    if verdict.emulated:
        return (
            "FP8 products were emulated on this machine, so their speed says nothing: whether FP8 is worth it is not "
            "known from this comparison."
        )
    worth = [v for v in verdict.variants if v.worth_it == "yes"]
    if worth:
        fast = [f"{v.name} ({v.speedup:.2f}× the baseline's speed)" if v.speedup else v.name for v in worth]
        return f"Worth it: {words.listing(fast)}."
    if none:
        return "None is worth it here: no variant is both safe and clearly faster."
    return "Whether FP8 is worth it is not known yet."
