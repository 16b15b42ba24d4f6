"""What a page of tables is made of: whole names, numbers of three digits, tables as wide as there is room.

A name for which there is none has lines of its own above its numbers: two that are shortened may look alike, and no
glob finds them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from narrowgauge.metrics.bins import SQNR_HIGH, SQNR_LOW
from narrowgauge.observe.report import words

GAP = 2
LEAST = 12  # columns that a name keeps however little room there is
INDENT = "  "  # of what goes on
LEFT = ("as", "shape", "best", "recipe", "format", "scale per")  # columns of words; numbers stand to the right


@dataclass(frozen=True)
class Names:
    """A table in which one column, of names, gets the room that the others leave.

    Args:
        titles: of all columns.
        rows: their cells; a cell that begins with "!" is red.
        name: which column holds names.
        whole: whether each is on one line, however little room there is.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    name: int = 0
    whole: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it as wide as there is room, and wider where its numbers need more: nothing of a table is left out."""
        widths = [max(cell_len(row[i]) for row in (self.titles, *self.rows)) for i in range(len(self.titles))]
        if not self.whole:
            others = sum(widths) - widths[self.name] + GAP * (len(widths) - 1)
            widths[self.name] = min(widths[self.name], max(LEAST, options.max_width - others))
        yield self._line(self.titles, widths, "bold")
        for row in self.rows:
            cells = list(row)
            if cell_len(row[self.name]) > widths[self.name]:
                yield Text(fold(row[self.name], options.max_width), no_wrap=True, overflow="ignore")
                cells[self.name] = ""
            yield self._line(cells, widths)

    def _line(self, cells: Sequence[str], widths: Sequence[int], style: str = "") -> Text:
        line = Text(no_wrap=True, overflow="ignore", style=style)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            room = " " * (width - cell_len(cell))
            left = i == self.name or self.titles[i] in LEFT
            line.append(cell if left else room + cell, style="red" if cell.endswith("!") else "")
            line.append((room if left else "") + " " * GAP)
        line.rstrip()
        return line


def shown(name: str) -> str:
    """A name without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def fold(name: str, room: int) -> str:
    """A name on lines that fit, broken behind its dots, and where a word is too long within it.

    >>> print(fold("model.layers.11.mlp.down_proj.weight", 20))
    model.layers.11.mlp.
      down_proj.weight
    """
    lines, line = [], ""
    for word in re.split(r"(?<=\.)", name):
        for part in (word,) if cell_len(word) <= room - len(INDENT) else word:
            if line.strip() and cell_len(line + part) > room:
                lines.append(line)
                line = INDENT
            line += part
    return "\n".join([*lines, line])


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
