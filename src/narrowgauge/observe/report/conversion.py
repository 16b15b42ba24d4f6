"""The conversion report's rows as a table a page can hold: equal layers of repeated blocks share a line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.observe.report import words
from narrowgauge.observe.verdict.converted import label


@dataclass(frozen=True)
class Line:
    """Some linear layers that were treated alike. `runs_in`: a recipe's name, or "" for high precision."""

    name: str
    layers: int
    shape: str
    share: str  # of the linear layers' FLOPs
    runs_in: str
    reason: str
    never_called: bool


def lines(rows: Sequence[Mapping[str, Any]]) -> tuple[Line, ...]:
    """Grouped lines in forward order; rows as `verdict.converted` has them, missing keys allowed."""
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for row in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "#", str(row.get("name", "?")))
        key = (
            pattern,
            tuple(row.get("shape") or ()),
            row.get("recipe"),
            row.get("reason"),
            row.get("backend"),
            _idle(row),
            tuple(row.get("of_ranks") or ()),
        )
        groups.setdefault(key, []).append(row)
    total = sum(float(row.get("flops_per_token") or 0) for row in rows)
    return tuple(_line(group, total) for group in groups.values())


def _idle(row: Mapping[str, Any]) -> bool:
    return row.get("recipe") is not None and row.get("calls") == 0


def _line(rows: list[Mapping[str, Any]], total: float) -> Line:
    first = rows[0]
    flops = sum(float(row.get("flops_per_token") or 0) for row in rows)
    reason = str(first.get("reason") or "")
    if first.get("backend"):
        reason += f"; {first['backend']} backend"
    if first.get("shared_with"):
        reason += f"; weight shared with {', '.join(map(str, first['shared_with']))}"
    shape = first.get("shape") or ()
    return Line(
        name=label({**first, "name": _name([str(row.get("name", "?")) for row in rows])}),
        layers=len(rows),
        shape=" × ".join(f"{n:,}" for n in reversed(shape)) if shape else words.NONE,
        share=words.percent(100 * flops / total, signed=False) if total else words.NONE,
        runs_in=str(first.get("recipe") or ""),
        reason=words.scrub(reason),
        never_called=_idle(first),
    )


def _name(names: list[str]) -> str:
    """
    One name for several.

    `layers.0.q`, `layers.1.q`, `layers.3.q` -> `layers.0–1,3.q`.
    """
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    return ".".join(
        values[0] if len(set(values)) == 1 else _ranges(sorted({int(v) for v in values})) for values in columns
    )


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
