"""What a conversion did to every linear layer of a model, and why.

    coverage = sum of 6 N K over converted layers  /  sum of 6 N K over all linear layers       (0 to 1)

6 N K are the FLOPs per token of a layer's three gemms when it trains (2 N K each). Convolutions, attention's
own products and embeddings are not linear layers and are not counted.

Legend: N = output features, K = input features.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.text import Text


class Counts(Protocol):
    """What a row keeps of a converted layer: how often its forward ran."""

    calls: int


@dataclass(frozen=True)
class Row:
    """One linear layer. `recipe` is None when it stays in high precision; `reason` always says why."""

    name: str
    shape: tuple[int, int]  # (N, K)
    recipe: str | None
    reason: str
    backend: str | None = None
    aliases: tuple[str, ...] = ()
    shared_with: tuple[str, ...] = ()  # other modules that own the same weight
    state: Counts | None = field(default=None, repr=False, compare=False)
    fp8_gemms: int = 3  # of a converted layer's three products
    block: int | None = None  # index of the repeated block that holds it
    blocks: int = 0  # how many repeated blocks the model has

    @property
    def flops_per_token(self) -> int:
        """6 N K: three gemms of 2 N K."""
        return 6 * self.shape[0] * self.shape[1]

    @property
    def calls(self) -> int | None:
        """Forward calls so far, live; None for a layer that stayed high (nothing counts those)."""
        return None if self.state is None else self.state.calls


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did. Prints as a table; `to_dict` is ready for JSON."""

    model: str
    recipe: str
    rows: tuple[Row, ...]
    backends: tuple[tuple[str, str, str], ...] = ()  # (recipe, backend, why that backend)
    notes: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[Row, ...]:
        """The layers that run in FP8."""
        return tuple(row for row in self.rows if row.recipe is not None)

    @property
    def coverage(self) -> float:
        """Share of the linear layers' FLOPs that was converted, 0 to 1."""
        total = sum(row.flops_per_token for row in self.rows)
        return sum(row.flops_per_token * row.fp8_gemms for row in self.converted) / (3 * total) if total else 0.0

    def never_called(self) -> tuple[str, ...]:
        """Names of converted layers whose forward has not run (all of them before the model first runs)."""
        return tuple(row.name for row in self.converted if not row.calls)

    def within(self, names: Collection[str]) -> ConversionReport:
        """This report without layers that the model has no more."""
        return replace(self, rows=tuple(row for row in self.rows if row.name in names))

    def joined(self, later: ConversionReport) -> ConversionReport:
        """This report with what a later conversion of the same model did: of one layer, the later row counts."""
        rows = {row.name: row for row in (*self.rows, *later.rows)}
        return replace(
            self,
            rows=tuple(rows.values()),
            backends=tuple(sorted({*self.backends, *later.backends})),
            notes=tuple(dict.fromkeys((*self.notes, *later.notes))),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings."""
        return {
            "model": self.model,
            "recipe": self.recipe,
            "coverage": self.coverage,
            "converted": len(self.converted),
            "linears": len(self.rows),
            "never_called": list(self.never_called()),
            "backends": [{"recipe": r, "backend": b, "reason": why} for r, b, why in self.backends],
            "notes": list(self.notes),
            "rows": [
                {
                    "name": row.name,
                    "shape": list(row.shape),
                    "recipe": row.recipe,
                    "reason": row.reason,
                    "backend": row.backend,
                    "flops_per_token": row.flops_per_token,
                    "fp8_gemms": row.fp8_gemms if row.recipe is not None else 0,
                    "calls": row.calls,
                    "aliases": list(row.aliases),
                    "shared_with": list(row.shared_with),
                    "block": row.block,
                    "blocks": row.blocks,
                }
                for row in self.rows
            ],
        }

    def table(self, full: bool = False) -> str:
        """Aligned plain text; equal rows of repeated blocks share a line unless `full`."""
        total = sum(row.flops_per_token for row in self.rows) or 1
        groups = [[row] for row in self.rows] if full else _group(self.rows)
        cells = [("layer", "out x in", "FLOPs", "runs in", "calls", "why")]
        for rows in groups:
            first = rows[0]
            share = 100 * sum(row.flops_per_token for row in rows) / total
            calls = {row.calls for row in rows}
            counts = [c for c in calls if c is not None]
            low, high = min(counts, default=0), max(counts, default=0)
            cells.append(
                (
                    _span([row.name for row in rows]),
                    f"{first.shape[0]} x {first.shape[1]}",
                    f"{share:.1f}%",
                    first.recipe or "high",
                    "" if not counts else str(low) if low == high else f"{low}-{high}",
                    _why(first),
                )
            )
        widths = [max(len(row[col]) for row in cells) for col in range(6)]
        rule = "  ".join("-" * width for width in widths[:5]) + "  ---"
        lines = [
            f"{self.model}: {len(self.converted)} of {len(self.rows)} linear layers in FP8, "
            f"{100 * self.coverage:.1f}% of the linear FLOPs",
            *(f"{recipe} runs on {backend}: {why}" for recipe, backend, why in self.backends),
            "",
            *(_line(row, widths) for row in cells[:1]),
            rule,
            *(_line(row, widths) for row in cells[1:]),
        ]
        idle = self.never_called()
        if idle and len(idle) < len(self.converted):
            lines += ["", f"converted and never called: {', '.join(idle)}"]
        lines += ["", *self.notes] if self.notes else []
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.table()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.table())  # IPython asks it of what a cell ends with

    def __rich__(self) -> Text:
        from rich.text import Text  # only a terminal needs it

        return Text(self.table())


def _line(row: tuple[str, ...], widths: Sequence[int]) -> str:
    left = (0, 3, 5)
    return "  ".join(
        text.ljust(width) if col in left else text.rjust(width)
        for col, (text, width) in enumerate(zip(row, [*widths[:5], 0], strict=True))
    )


def _why(row: Row) -> str:
    parts = [row.reason]
    if row.aliases:
        parts.append(f"also called {', '.join(row.aliases)}")
    if row.shared_with:
        parts.append(f"weight shared with {', '.join(row.shared_with)}")
    return "; ".join(parts)


def _group(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows alike in everything but the numbers in their names, in order of first appearance."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        plain = not row.aliases and not row.shared_with
        key = (
            re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "#", row.name) if plain else row.name,
            row.shape,
            row.recipe,
            row.backend,
            row.reason,
        )
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _span(names: Sequence[str]) -> str:
    """`layers.0.q`, `layers.1.q`, `layers.2.q` -> `layers.0-2.q`; other sets list their numbers."""
    if len(names) == 1:
        return names[0]
    split = [name.split(".") for name in names]
    out = []
    for column in zip(*split, strict=True):
        values = list(dict.fromkeys(column))
        out.append(values[0] if len(values) == 1 else _ranges(sorted(int(value) for value in values)))
    return ".".join(out) + f" ({len(names)})"


def _ranges(numbers: Sequence[int]) -> str:
    """0 1 2 5 -> `0-2,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
