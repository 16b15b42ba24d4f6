"""What a page of tables is made of: names that fit, numbers of three digits, tables as wide as there is room.

Names are shortened word by word, and only then in their middle: what tells `layers.0.mlp.up.weight` from its neighbours
are the number and the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from narrowgauge.metrics.bins import SQNR_HIGH, SQNR_LOW
from narrowgauge.observe.report import words

GAP = 2
LEAST = 12  # columns that a name keeps however little room there is
LEFT = ("as", "shape", "best", "recipe", "format", "scale per")  # columns of words; numbers stand to the right


@dataclass(frozen=True)
class Names:
    """A table in which one column, of names, gets the room that the others leave.

    Args:
        titles: of all columns.
        rows: their cells; a cell that begins with "!" is red.
        name: which column holds names.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    name: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it as wide as there is room."""
        widths = [max(len(row[i]) for row in (self.titles, *self.rows)) for i in range(len(self.titles))]
        others = sum(widths) - widths[self.name] + GAP * (len(widths) - 1)
        room = max(LEAST, options.max_width - others)
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for i, title in enumerate(self.titles):
            text = i == self.name or title in LEFT
            table.add_column(Text(title), justify="left" if text else "right", no_wrap=True)
        for row in self.rows:
            cells = (cut(cell, room) if i == self.name else cell for i, cell in enumerate(row))
            table.add_row(*(Text(cell, style="red" if cell.endswith("!") else "") for cell in cells))
        yield table


def shown(name: str) -> str:
    """A name without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def cut(name: str, room: int) -> str:
    """A name that fits: its words shortened from the left, numbers kept; if that is not enough, its middle left out.

    >>> cut("model.layers.11.mlp.down_proj.weight", 27)
    'm.l.11.mlp.down_proj.weight'
    """
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= room:
            break
        parts[i] = part if part.isdigit() else part[:1]
    short = ".".join(parts)
    if len(short) <= room:
        return short
    tail = room // 2
    return f"{short[: room - 1 - tail]}…{short[len(short) - tail :]}"


def many(count: int, one: str, more: str = "") -> str:
    """A count and its word: "1 tensor", "2 tensors"."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def db(value: float) -> str:
    """Decibels with one decimal; a perfect copy has no noise at all."""
    if math.isinf(value):
        return "exact" if value > 0 else "none"
    return f"{value:.1f}" if value == value else words.NONE


def db_of_bins(value: float) -> str:
    """Decibels that were read from a histogram, whose end bins are open."""
    if math.isinf(value):
        return f">={SQNR_HIGH:.0f}" if value > 0 else f"<{SQNR_LOW:.0f}"
    return db(value)


def number(value: float) -> str:
    """Any number with three digits."""
    return f"{value:.3g}" if value == value else words.NONE


def amount(value: float, step: int, units: Sequence[str]) -> str:
    """A count with three digits and the word for its size."""
    power = 0
    while value >= step and power < len(units) - 1:
        value, power = value / step, power + 1
    return f"{value:.4g}{units[power]}"
