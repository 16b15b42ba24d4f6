"""The verdict as a headline and a table: what the page and the terminal both say, in the same words.

Columns are the runs (baseline, noise twin, then the variants), rows the measures, in three questions: is it safe, is it
worth it, and how much of it was FP8. A cell has a text and, below it, what the number means.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from narrowgauge.observe.report import words
from narrowgauge.observe.verdict.types import TwinFacts, VariantVerdict, Verdict

OUTCOMES = {
    "pass": ("✓", "pass"),
    "watch": ("!", "watch"),
    "fail": ("✕", "fail"),
    "inconclusive": ("?", "inconclusive"),
    "unjudged": ("–", "not judged"),
}
ANSWERS = {"yes": "yes", "no": "no", "unknown": "not known yet"}


@dataclass(frozen=True)
class Cell:
    """A number and, in small type, what it means; `warn` marks what a reader should not miss."""

    text: str
    note: str = ""
    warn: bool = False


@dataclass(frozen=True)
class Row:
    """One measure over all columns."""

    label: str
    hint: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Block:
    """The rows that answer one question."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Summary:
    """Column names in order, and the blocks of rows."""

    columns: tuple[str, ...]
    blocks: tuple[Block, ...]


def headline(verdict: Verdict) -> list[tuple[str, str]]:
    """The whole verdict in one sentence, as (text, variant's name or "") parts so that names can take their colour."""
    if not verdict.judged:
        return [("Nothing was judged.", "")]
    if not verdict.variants:
        return [("No FP8 variant was run.", "")]
    order = {"yes": 0, "unknown": 1, "no": 2}
    ranked = sorted(verdict.variants, key=lambda v: order[v.safe])
    groups = [(safe, [v.name for v in group]) for safe, group in groupby(ranked, key=lambda v: v.safe)]
    parts: list[tuple[str, str]] = []
    for i, (safe, names) in enumerate(groups):
        parts.append(("; ", "") if i else ("", ""))
        for j, name in enumerate(names):
            joint = "" if j == 0 else " and " if j == len(names) - 1 else ", "
            parts += [(joint, ""), (name, name)]
        parts.append((_claim(safe, len(names), after_safe=i > 0 and groups[0][0] == "yes"), ""))
    parts.append((".", ""))
    return [part for part in parts if part[0]]


def _claim(safe: str, n: int, *, after_safe: bool) -> str:
    verb = " is" if n == 1 else " are"
    if safe == "yes":
        return f"{verb} safe"
    if safe == "no":
        return f"{verb} not" if after_safe else f"{verb} not safe"
    return f"{verb} not known to be yet" if after_safe else f"{verb} not known to be safe yet"


def speed_line(verdict: Verdict) -> str:
    """One sentence on speed: who is worth it, or why that cannot be said."""
    if verdict.emulated:
        return ("FP8 products were emulated on this machine, so their speed says nothing: whether FP8 is worth it is "
                "not known from this comparison.")
    worth = [v for v in verdict.variants if v.worth_it == "yes"]
    if worth:
        fast = [f"{v.name} ({v.speedup:.2f}× as fast)" if v.speedup else v.name for v in worth]
        return f"Worth it: {words.listing(fast)}."
    if verdict.variants and all(v.worth_it == "no" for v in verdict.variants):
        return "None of them is worth it here: no variant is both faster and safe."
    return "Whether it is worth it is not known yet."


def summary(verdict: Verdict) -> Summary:
    """The table of a verdict."""
    twins = [verdict.baseline, *([verdict.noise] if verdict.noise else [])]
    variants = verdict.variants
    names = tuple(t.name for t in twins) + tuple(v.name for v in variants)
    band = next((v.band_pct for v in variants if v.band_pct is not None), None)
    safe = [
        Row("Loss gap", f"paired, mean over {_window(variants)}", _twin_cells(twins, _twin_loss(band)) + tuple(map(_gap, variants))),
        Row("Loss at the same weights", "largest gap of the snapshots; free of training noise",
            _blank(twins) + tuple(map(_same_loss, variants))),
        Row("Gradient at the same weights", "lowest cosine of the snapshots; 1 is exact",
            _blank(twins) + tuple(map(_same_cosine, variants))),
        Row(_eval_label(variants), "at the last evaluation", _twin_cells(twins, _twin_eval) + tuple(map(_eval, variants))),
        Row("NaN steps", "loss or gradient not finite", _twin_cells(twins, lambda t: _flagged(t.nan_steps))
            + tuple(_flagged(v.nan_steps) for v in variants)),
        Row("Skipped steps", "the loss scaler skipped the update", _twin_cells(twins, lambda t: _flagged(t.skipped_steps))
            + tuple(_flagged(v.skipped_steps) for v in variants)),
    ]
    if any(x.error or x.exit_code for x in (*twins, *variants)):
        ends = tuple(Cell(f"exit code {x.exit_code}", words.scrub(x.error), warn=True) if x.error or x.exit_code
                     else Cell("to its end") for x in (*twins, *variants))
        safe.append(Row("Ran", f"of {verdict.steps:,} steps", ends))
    worth = [
        Row("Step time", "median of undisturbed steps", _twin_cells(twins, lambda t: Cell(words.seconds(t.step_seconds)))
            + tuple(_step(v, verdict.emulated) for v in variants)),
        Row("Tokens per second", "", _twin_cells(twins, lambda t: Cell(words.count(t.tokens_per_second)))
            + tuple(Cell(words.count(v.tokens_per_second)) for v in variants)),
        Row("Peak memory", "", _twin_cells(twins, lambda t: Cell(words.memory(t.peak_memory_bytes)))
            + tuple(_memory(v, verdict.baseline) for v in variants)),
    ]
    share = [
        Row("FP8 share of all FLOPs", "matrix products of the model", _blank(twins)
            + tuple(Cell(words.percent(v.flop_share_pct, signed=False)) for v in variants)),
        Row("FP8 share of the linear layers", "by FLOPs", _blank(twins)
            + tuple(Cell(words.percent(v.linear_share_pct, signed=False)) for v in variants)),
        Row("Cost of watching", "share of the run's time", _blank(twins)
            + tuple(Cell(words.percent(v.watch_pct, signed=False)) for v in variants)),
    ]
    return Summary(names, (Block("Is it safe?", tuple(safe)), Block("Is it worth it?", tuple(worth)),
                           Block("How much of it was FP8?", tuple(share))))


def gap_note(v: VariantVerdict) -> str:
    """What the gap beside its band means, in a few words."""
    if v.gap_pct is None:
        return "no common steps with the baseline"
    if v.band_pct is None:
        return "no noise twin to compare with"
    inside = abs(v.gap_pct) <= v.band_pct
    return "inside the noise band" if inside else "outside the noise band"


def _window(variants: tuple[VariantVerdict, ...]) -> str:
    windows = {v.window for v in variants if v.window}
    if len(windows) != 1:
        return "the last quarter"
    first, last = next(iter(windows))
    return f"steps {first:,}–{last:,}"


def _gap(v: VariantVerdict) -> Cell:
    return Cell(words.percent(v.gap_pct), gap_note(v), warn=v.outcome == "fail")


def _twin_loss(band: float | None):  # type: ignore[no-untyped-def]
    def cell(twin: TwinFacts) -> Cell:
        if twin.name == "noise" and band is not None:
            return Cell(f"±{words.percent(band, signed=False)}", "the band that chance makes")
        return Cell(words.loss(twin.final_loss), "its loss")

    return cell


def _twin_eval(twin: TwinFacts) -> Cell:
    return Cell(words.loss(twin.eval_value), "")


def _eval_label(variants: tuple[VariantVerdict, ...]) -> str:
    name = next((v.eval_name for v in variants if v.eval_name), "")
    return f"Gap in {name}" if name else "Evaluation"


def _eval(v: VariantVerdict) -> Cell:
    if not v.eval_name or v.eval_gap_pct is None:
        return Cell("not evaluated")
    band = "" if v.eval_band_pct is None else f"noise band ±{words.percent(v.eval_band_pct, signed=False)}"
    return Cell(words.percent(v.eval_gap_pct), band)


def _same_loss(v: VariantVerdict) -> Cell:
    if not v.same_weights:
        return Cell(words.NONE, words.scrub(v.same_weights_note) or "not measured")
    worst = max((s.loss_gap_pct for s in v.same_weights), key=abs)
    return Cell(words.percent(worst), f"{len(v.same_weights)} snapshots" if len(v.same_weights) > 1 else "1 snapshot")


def _same_cosine(v: VariantVerdict) -> Cell:
    return Cell(words.cosine(min((s.grad_cosine for s in v.same_weights), default=None)))


def _flagged(number: int) -> Cell:
    return Cell(str(number), warn=number > 0)


def _step(v: VariantVerdict, emulated: bool) -> Cell:
    if emulated:
        return Cell(words.seconds(v.step_seconds), "emulated, no speed verdict")
    return Cell(words.seconds(v.step_seconds), f"{v.speedup:.2f}× the baseline's speed" if v.speedup else "")


def _memory(v: VariantVerdict, baseline: TwinFacts) -> Cell:
    if not v.peak_memory_bytes or not baseline.peak_memory_bytes:
        return Cell(words.memory(v.peak_memory_bytes))
    change = 100 * (v.peak_memory_bytes / baseline.peak_memory_bytes - 1)
    return Cell(words.memory(v.peak_memory_bytes), words.percent(change))


def _twin_cells(twins: list[TwinFacts], cell) -> tuple[Cell, ...]:  # type: ignore[no-untyped-def]
    return tuple(cell(twin) for twin in twins)


def _blank(twins: list[TwinFacts]) -> tuple[Cell, ...]:
    return tuple(Cell("") for _ in twins)
