"""The verdict on a terminal: a sentence for each variant, then the page's table. Plain where there is no terminal.

`render` gives a rich renderable, so that `Console` decides on colour and width; `plain` gives text for a log file,
without any escape code.
"""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from narrowgauge.observe.report import headline, summary, words
from narrowgauge.observe.verdict.types import VariantVerdict, Verdict

MARKS = {"inside the noise band": "({})", "not judged": "{}?"}  # of a number, whose note has no room in the table
STYLES = {"pass": "green", "watch": "yellow", "fail": "bold red", "inconclusive": "cyan", "unjudged": "dim"}


def render(verdict: Verdict) -> RenderableType:
    """The verdict for a rich `Console`: headline, sentences, table, notes. All strings are literal, never markup."""
    parts: list[RenderableType] = [Text(""), Text("".join(t for t, _ in headline.headline(verdict)), style="bold")]
    parts.append(Text(words.scrub(verdict.why_not) or headline.speed_line(verdict)))
    parts += [_variant(v) for v in verdict.variants]
    parts += [Text(""), _table(verdict), *_legend(verdict)]
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


def _table(verdict: Verdict) -> Table:
    facts = summary.summary(verdict)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for name in facts.columns:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for block in facts.blocks:
        table.add_row(Text(block.title, style="dim"))
        for row in block.rows:
            # A terminal's cell is one short line; of the notes only those that change a number's meaning are kept.
            emulated = any(cell.note == summary.EMULATED for cell in row.cells)
            table.add_row(Text(f"  {row.label}" + (", FP8 emulated" if emulated else "")), *map(_cell, row.cells))
    return table


def _cell(cell: summary.Cell) -> Text:
    return Text(MARKS.get(cell.note, "{}").format(cell.text.replace(" %", "%")), style="red" if cell.warn else "")


def _legend(verdict: Verdict) -> list[RenderableType]:
    """What the marks in the table mean, if there are any."""
    notes = {cell.note for block in summary.summary(verdict).blocks for row in block.rows for cell in row.cells}
    said = [f"{mark.format('n%')}  {note}" for note, mark in MARKS.items() if note in notes]
    return [Text("  " + "    ".join(said), style="dim")] if said else []
