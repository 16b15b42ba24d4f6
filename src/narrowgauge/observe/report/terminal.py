"""The verdict on a terminal: a sentence for each variant, then the page's table. Plain where there is no terminal.

`render` gives a rich renderable, so that `Console` decides on colour and width; `plain` gives text for a log file,
without any escape code.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from narrowgauge.observe.report import headline, summary, words
from narrowgauge.observe.verdict.types import VariantVerdict, Verdict

# A cell is one short line: of the notes below a number, those that change its meaning become a mark.
MARKS = {"inside the noise band": "({})", "not judged": "{}?", summary.EMULATED: "{}*"}
Line = tuple[str, str, list[str], list[str]]  # block, label, texts, styles
GAP = 2  # between columns
STYLES = {"pass": "green", "watch": "yellow", "fail": "bold red", "inconclusive": "cyan", "unjudged": "dim"}


def render(verdict: Verdict) -> RenderableType:
    """The verdict for a rich `Console`: headline, sentences, table, notes. All strings are literal, never markup."""
    parts: list[RenderableType] = [Text(""), Text("".join(t for t, _ in headline.headline(verdict)), style="bold")]
    if verdict.why_not:  # the same for every variant: said once
        why = words.scrub(verdict.why_not.removeprefix("Not judged: "))
        parts.append(Text(why[:1].upper() + why[1:]))
        steps = dict.fromkeys(v.next_step for v in verdict.variants if v.next_step)
        parts += [Text.assemble(("Next: ", "bold"), words.scrub(step)) for step in steps]
    else:
        parts.append(Text(headline.speed_line(verdict)))
        parts += [_variant(v) for v in verdict.variants]
    parts += [Text(""), Tables(summary.summary(verdict))]
    if verdict.notes:
        parts.append(Text(""))
        parts += [Text(f"note: {words.scrub(note)}", style="dim") for note in verdict.notes]
    return Group(*parts)


def plain(verdict: Verdict, width: int = 160) -> str:
    """The same as plain text, `width` columns wide at most."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(render(verdict))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _variant(v: VariantVerdict) -> RenderableType:
    sign, word = headline.OUTCOMES[v.outcome]
    head = Text.assemble(
        ("\n" + v.name, "bold"),
        "  ",
        (f"{sign} {word}", STYLES[v.outcome]),
        f"   safe: {headline.ANSWERS[v.safe]}   worth it: {headline.ANSWERS[v.worth_it]}",
    )
    lines: list[RenderableType] = [head, Padding(Text(words.scrub(v.sentence)), (0, 0, 0, 2))]
    if v.worst and v.worst[0].remedy != "nothing to do":
        lines.append(Padding(Text(f"Worst: {v.worst[0].site}. {words.scrub(v.worst[0].why)}"), (0, 0, 0, 2)))
    if v.next_step:
        lines.append(Padding(Text.assemble(("Next: ", "bold"), words.scrub(v.next_step)), (0, 0, 0, 2)))
    return Group(*lines)


@dataclass(frozen=True)
class Tables:
    """The summary as one table, or as several below each other where the runs do not fit side by side.

    Every part repeats the twins, which the variants are read against.
    """

    facts: summary.Summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many as the width asks for."""
        rows = [(block.title, row.label, *_cells(row)) for block in self.facts.blocks for row in block.rows]
        label = 2 + max(len(name) for _, name, *_ in rows)
        widths = [max(len(text), *(len(r[2][i]) for r in rows)) + GAP for i, text in enumerate(self.facts.columns)]
        for number, columns in enumerate(_parts(label, widths, options.max_width + GAP)):
            if number:
                yield Text("")
            yield _table(self.facts.columns, rows, columns)
        notes = {cell.note for block in self.facts.blocks for row in block.rows for cell in row.cells}
        said = [f"{mark.format('n')}  {note}" for note, mark in MARKS.items() if note in notes]
        if said:
            yield Text("\n" + "    ".join(said), style="dim")


def _parts(label: int, widths: Sequence[int], room: int) -> list[list[int]]:
    """Which columns stand side by side: the two twins in every part, and at least one variant beside them."""
    twins, parts = [0, 1][: len(widths)], [[]]  # type: list[int], list[list[int]]
    for i in range(len(twins), len(widths)):
        if parts[-1] and label + sum(widths[j] for j in (*twins, *parts[-1], i)) > room:
            parts.append([])
        parts[-1].append(i)
    return [[*twins, *part] for part in parts]


def _table(names: Sequence[str], rows: Sequence[Line], columns: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for i in columns:
        table.add_column(Text(names[i]), justify="right", no_wrap=True)
    title = ""
    for block, label, texts, styles in rows:
        if block != title:
            table.add_row(Text(block, style="dim"))
            title = block
        table.add_row(Text(f"  {label}"), *(Text(texts[i], style=styles[i]) for i in columns))
    return table


def _cells(row: summary.Row) -> tuple[list[str], list[str]]:
    """A row's cells as (texts, styles)."""
    texts = [MARKS.get(cell.note, "{}").format(cell.text.replace(" %", "%")) for cell in row.cells]
    return texts, ["red" if cell.warn else "" for cell in row.cells]
