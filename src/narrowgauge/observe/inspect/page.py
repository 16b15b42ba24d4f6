"""An inspection on a terminal: one line about the file, then only what a reader has to know, the worst first.

NaN and Inf        what is broken before anything is quantized
recipes            per recipe: the median over all matrices, how many are in trouble, the worst and its numbers
matrices           the worst under the first recipe first; of a single recipe every number
FP8, vectors       what is FP8 already; norms, biases and scalars
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from narrowgauge.compute.quant.dtypes import TORCH_DTYPES
from narrowgauge.observe.inspect.entry import word
from narrowgauge.observe.inspect.inspection import Inspection, Looked
from narrowgauge.observe.inspect.scales import one_per
from narrowgauge.observe.inspect.tables import Names, amount, db, db_of_bins, many, number, shown
from narrowgauge.observe.report import words

NUMBERS = {
    "SQNR dB": "sqnr_db",
    "p5 row": "p5_row_sqnr_db",
    "p5 col": "p5_col_sqnr_db",
    "under %": "underflow_pct",
    "sat %": "saturation_pct",
    "lost %": "lost_energy_pct",
    "gain": "gain",
}
WORST = ("SQNR dB", "p5 row", "under %", "sat %", "lost %", "gain")
WORST_OF = "worst:"
SIDE = 16  # what the sides of an FP8 product's operands are multiples of
WIDTH = 100
SOME = 3  # names in a note
SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
SHORT |= {word(dtype): fmt.name for fmt, dtype in TORCH_DTYPES.items()}


def page(seen: Inspection, top: int = 20, *, whole: bool = False) -> RenderableType:
    """Everything that fits a screen, at most `top` rows per table, for a rich `Console`. Strings are never markup.

    `whole`: every row and sentence is one line. Print it with `crop=False`: a table may be wider than a screen.
    """
    text = partial(Text, no_wrap=True, overflow="ignore") if whole else Text
    parts: list[RenderableType] = [text(first_line(seen), style="bold")]
    for title, table in (
        _not_finite(seen, top),
        *(_recipes(seen, role) for role in seen.roles),
        _matrices(seen, top),
        _codes(seen, top),
        _vectors(seen, top),
    ):
        if table.rows:
            parts += [Text(""), text(title, style="bold"), replace(table, whole=whole)]
    notes = [*_why(seen), *_notes(seen)]
    if notes:
        parts += [Text(""), *(text(note, style="dim") for note in notes)]
    return Group(*parts)


def plain(seen: Inspection, top: int = 20, width: int | None = None) -> str:
    """The same as plain text, in lines that are as long as they are, or of a screen of this width."""
    out = io.StringIO()
    console = Console(file=out, width=width or WIDTH, color_system=None, force_terminal=False)
    console.print(page(seen, top, whole=width is None), crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def first_line(seen: Inspection) -> str:
    """The file in one line: its name, how many tensors and parameters, its size, its dtypes."""
    tensors = many(len(seen.checkpoint.entries), "tensor")
    dtypes = ", ".join(f"{SHORT.get(dtype, dtype)} {count}" for dtype, count in seen.dtypes.items())
    size = amount(seen.checkpoint.size, 1024, (" bytes", " KiB", " MiB", " GiB", " TiB"))
    parameters = amount(seen.parameters, 1000, ("", "k", "M", "B", "T"))
    return f"{shown(seen.checkpoint.path.name)}: {tensors}, {parameters} parameters, {size}: {dtypes or 'nothing'}"


def _not_finite(seen: Inspection, top: int) -> tuple[str, Names]:
    rows = seen.not_finite()
    cells = [
        [_name(row), _shape(row), f"{row.own['nan_count']:,}", f"{row.own['inf_count']:,}", f"{row.entry.numel:,}"]
        for row in rows[:top]
    ]
    title = f"NaN or Inf in {len(rows)} of {len(seen.rows)} tensors{_of(len(rows), top)}"
    return title, Names(("tensor", "shape", "NaN", "Inf", "of"), cells)


def _recipes(seen: Inspection, role: str) -> tuple[str, Names]:
    """One line per rule, with the numbers of its worst tensor of a role."""
    cells = []
    for rule in seen.rules:
        rows = seen.worst(rule.name, role)
        if not rows:
            continue
        trouble = sum(row.judged[rule.name].sign is not None for row in rows)
        median = db(_median([row.became[rule.name]["sqnr_db"] for row in rows]))
        per = one_per(rule.operands[role].granularity)
        worst = [_cell(rows[0], rule.name, title) for title in WORST]
        cells.append([rule.name, per, median, f"{trouble}!" if trouble else "0", *worst])
    titles = ("recipe", "scale per", "median dB", "trouble", *(f"{WORST_OF} {WORST[0]}", *WORST[1:]))
    matrices = many(sum(row.role == role for row in seen.of("matrix")), "matrix", "matrices")
    return f"What each recipe would do to {matrices} as {role}", Names(titles, cells)


def _matrices(seen: Inspection, top: int) -> tuple[str, Names]:
    names = [rule.name for rule in seen.rules]
    every = seen.worst(names[0])
    rows = every[:top]
    title = f"Matrices, the worst under {names[0]} first{_of(len(every), top)}"
    several = len(seen.roles) > 1
    about = [[_name(row), *([row.role] if several else []), _shape(row)] for row in rows]
    titles = ("tensor", *(["as"] if several else []), "shape")
    if len(names) == 1:
        cells = [[*front, *(_cell(row, names[0], t) for t in NUMBERS)] for front, row in zip(about, rows, strict=True)]
        return title, Names((*titles, *NUMBERS), cells)
    cells = [
        [*front, *(_cell(row, name, "SQNR dB") for name in names), row.best or words.NONE]
        for front, row in zip(about, rows, strict=True)
    ]
    return f"{title}: SQNR in dB", Names((*titles, *names, "best"), cells)


def _codes(seen: Inspection, top: int) -> tuple[str, Names]:
    rows = sorted(seen.of("codes"), key=lambda row: (-row.codes["nan"], -row.codes["max"] / row.entry.numel))
    cells = []
    for row in rows[:top]:
        facts, numel = row.codes, row.entry.numel
        shares = (number(100 * facts[name] / numel) for name in ("max", "zeros"))
        per = facts["one_per"] or "no scale!"
        cells.append(
            [_name(row), _shape(row), facts["format"], per, str(facts["codes_used"]), *shares, str(facts["nan"]),
             number(row.own["amax"])]
        )  # fmt: skip
    titles = ("tensor", "shape", "format", "scale per", "codes", "at max %", "zeros %", "NaN", "amax")
    return f"FP8 already, most codes at their largest first{_of(len(rows), top)}", Names(titles, cells)


def _vectors(seen: Inspection, top: int) -> tuple[str, Names]:
    rows = sorted((row for row in seen.of("vector") if not row.entry.optimizer), key=lambda row: -_or(row.own["amax"]))
    columns = ("amax", "amin", "mean", "std", "kurtosis")
    cells = [[_name(row), _shape(row), *(number(row.own[name]) for name in columns)] for row in rows[:top]]
    return f"Vectors, the largest first{_of(len(rows), top)}", Names(("tensor", "shape", *columns), cells)


def _why(seen: Inspection) -> Iterator[str]:
    """What the marks mean, and for each recipe why its worst tensor has one."""
    troubled = [
        (rule, rows[0]) for rule in seen.rules if (rows := seen.worst(rule.name)) and rows[0].judged[rule.name].sign
    ]
    if not troubled:
        return
    yield "!  in trouble: beyond a limit of the verdict's. The worst:"
    for rule, row in troubled:
        yield f"   {rule.name}: {_name(row)}"
        yield f"      {row.judged[rule.name].why}"


def _notes(seen: Inspection) -> Iterator[str]:
    if same := [(rule, rule.same) for rule in seen.rules if rule.same and seen.of("matrix")]:
        yield from (
            f"{words.listing(others)}: like {rule.name}, while the amax stays what it is." for rule, others in same
        )
    if left := len(seen.checkpoint.entries) - len(seen.rows):
        yield f"Looked at {many(len(seen.rows), 'tensor')}, as --only says; {left} more are in the file."
    yield from seen.checkpoint.notes
    weights = [row for row in seen.of("matrix") if row.role == "weight"]
    if kernels := [row for row in weights if row.entry.kernel]:
        yield f"Taken for weights of convolutions, a row being all that makes one output: {_some(kernels)}."
    matrices = [row for row in weights if len(row.entry.shape) == 2]
    if odd := [row for row in matrices if any(side % SIDE for side in row.entry.shape)]:
        yield f"A side is no multiple of {SIDE}, so no FP8 unit takes it: {_some(odd)}."
    for kind, said in (
        ("scale", "Scales of FP8 tensors, read with them"),
        ("tied", "Tied to others and counted once"),
        ("empty", "Without elements"),
        ("skipped", "Left out"),
    ):
        if rows := seen.of(kind):
            yield f"{said}: {_some(rows)}."
    if optimizer := [row for row in seen.of("vector") if row.entry.optimizer]:
        count = many(len(optimizer), "tensor")
        yield f"An optimizer's, which no recipe quantizes: {count}; --json has their statistics."
    if wide := [row for row in seen.rows if row.entry.dtype == "float64" and row.own]:
        yield f"Looked at as float32: {many(len(wide), 'float64 tensor')}."
    yield from (f"{_name(row)}: {row.note}." for row in seen.of("codes") if row.note)


def _some(rows: Sequence[Looked]) -> str:
    names = [f"{_name(row)} ({row.note})" if row.note else _name(row) for row in rows[:SOME]]
    return ", ".join(names) + (f" and {len(rows) - SOME:,} more" if len(rows) > SOME else "")


def _of(count: int, top: int) -> str:
    return f" ({top} of {count})" if count > top else ""


def _name(row: Looked) -> str:
    return shown(row.entry.name) or '""'


def _shape(row: Looked) -> str:
    return "x".join(map(str, row.entry.shape)) or "scalar"


def _cell(row: Looked, rule: str, title: str) -> str:
    """A number of what a recipe makes of a tensor; its SQNR carries the mark of trouble."""
    value = row.became[rule][NUMBERS[title]]
    if title == "SQNR dB":
        return db(value) + ("!" if row.judged[rule].sign else "")
    if title == "gain":
        return f"{value:.4f}" if value == value else words.NONE  # three digits do not tell 0.9971 from 0.9965
    return db_of_bins(value) if title.startswith("p5") else number(value)


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return float(np.median(known)) if known else float("nan")


def _or(value: float) -> float:
    return value if value == value else float("-inf")
