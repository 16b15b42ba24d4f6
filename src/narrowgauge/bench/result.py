"""What a benchmark leaves: one JSON object with the machine, the versions and the date, and the same as a table.

    schema      1; a number that grows when a field changes its meaning
    benchmark   its name            date        of the run, UTC
    hardware    the GPU or the CPU  versions    of what took part
    settings    what was asked      ceilings    what this device was measured to reach, where that was done
    measured    false where there was nothing to measure on; `reason` then says so and `rows` is empty
    rows        one flat object per line of the table; a dict of numbers in it is a table of its own
    notes       sentences that the figures need

The JSON has one line per row, so that two results can be compared line by line.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from narrowgauge.session.machine import git_revision, hardware, versions

SCHEMA = 1
Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One benchmark's outcome."""

    benchmark: str
    settings: Mapping[str, Any]
    rows: Sequence[Row] = ()
    ceilings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    reason: str = ""  # why nothing was measured

    def so_far(self) -> Result:
        """The same, marked as what was measured before the rest was."""
        return replace(self, notes=[*self.notes, "unfinished: more was still to be measured when this was written."])

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, as the module's head describes."""
        return {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "hardware": hardware(),
            "versions": versions(),
            "git_revision": git_revision(Path.cwd()),
            "measured": not self.reason,
            "reason": self.reason,
            "settings": dict(self.settings),
            "ceilings": dict(self.ceilings),
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The same as text; one line per row."""
        facts = self.to_dict()
        rows = facts.pop("rows")
        head = json.dumps(facts, indent=1)[:-2]
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        return head + ',\n "rows": [' + (f"\n  {lines}\n ]" if rows else "]") + "\n}\n"

    def table(self) -> str:
        """For people: a heading, the rows, then each nested table, then the notes."""
        if self.reason:
            return self.reason
        parts = [f"{self.benchmark} on {hardware()}"]
        if self.ceilings:
            parts.append("ceilings: " + ", ".join(f"{name} {_cell(value)}" for name, value in self.ceilings.items()))
        parts += ["", aligned([_scalars(row) for row in self.rows])]
        names = [key for row in self.rows for key, value in row.items() if isinstance(value, dict)]
        for name in dict.fromkeys(names):
            nested = [row for row in self.rows if isinstance(row.get(name), dict)]
            if not any(isinstance(value, list) for row in nested for value in row[name].values()):
                parts += ["", name, aligned([_named(row) | row[name] for row in nested])]
        return "\n".join([*parts, *(["", *self.notes] if self.notes else [])])


def figures(value: float, digits: int = 4) -> float:
    """`value` with so many significant digits: what a measurement is worth.

    >>> figures(0.000123456), figures(123456.7)
    (0.0001235, 123500.0)
    """
    return float(f"{value:.{digits}g}")


def aligned(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text, one column per key in order of first appearance; words to the left, numbers to the right."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key)) for key in keys] for row in rows]
    wordy = [any(isinstance(row.get(key), str) for row in rows) for key in keys]
    widths = [max(len(key), *(len(line[i]) for line in cells)) for i, key in enumerate(keys)]

    def line(texts: Sequence[str]) -> str:
        padded = [t.ljust(w) if left else t.rjust(w) for t, w, left in zip(texts, widths, wordy, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(keys), *(line(texts) for texts in cells)])


def _scalars(row: Row) -> Row:
    return {key: value for key, value in row.items() if not isinstance(value, dict | list)}


def _named(row: Row) -> Row:
    """The words that a row begins with: they say which row it is."""
    named: Row = {}
    for key, value in row.items():
        if not isinstance(value, str):
            break
        named[key] = value
    return named


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)
