"""The verdict as a table: what the page and the terminal both show, in the same words.

Columns are the runs (baseline, noise twin, then the variants), rows the measures, in three questions: is it safe, is
it worth it, and how much of it was FP8. A cell has a text and, below it, what the number means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.observe.report import words
from narrowgauge.observe.verdict.types import TwinFacts, VariantVerdict, Verdict

EMULATED = "emulated, no speed verdict"


@dataclass(frozen=True)
class Cell:
    """A number and, in small type, what it means; `warn` marks what a reader should not miss."""

    text: str = ""
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


def summary(verdict: Verdict) -> Summary:
    """The table of a verdict."""
    twins = (verdict.baseline, *([verdict.noise] if verdict.noise else []))

    def row(
        label: str,
        hint: str,
        variant: Callable[[VariantVerdict], Cell],
        twin: Callable[[TwinFacts], Cell] = lambda _: Cell(),
    ) -> Row:
        return Row(label, hint, tuple(map(twin, twins)) + tuple(map(variant, verdict.variants)))

    safe = [
        row("Loss gap", f"paired, mean over {_window(verdict)}", _gap, lambda t: _twin_loss(t, verdict)),
        row("Loss at same weights", "largest gap of the snapshots; free of training noise", _same_loss),
        row("Gradient at same weights", "lowest cosine of the snapshots; 1 is exact", _same_cosine),
        row(_eval_label(verdict), "last evaluation", _eval, lambda t: Cell(words.loss(t.eval_value))),
        row("NaN steps", words.NAN_STEPS, lambda v: _count(v.nan_steps), lambda t: _count(t.nan_steps)),
        row("Skipped steps", words.SKIPPED_STEPS, _skipped, _skipped),
    ]
    if any(t.exit_code or t.error for t in twins) or any(v.exit_code or v.error for v in verdict.variants):
        safe.append(row("Ended", f"of {verdict.steps:,} steps", _end, _end))
    worth = (
        row("Step time", "median of undisturbed steps", lambda v: _step(v, verdict.emulated),
            lambda t: Cell(words.seconds(t.step_seconds))),
        row(f"{verdict.baseline.counted.capitalize()} per second", "", lambda v: Cell(words.count(v.tokens_per_second)),
            lambda t: Cell(words.count(t.tokens_per_second))),
        row("Peak memory", "", lambda v: _memory(v, verdict.baseline),
            lambda t: Cell(words.memory(t.peak_memory_bytes))),
    )  # fmt: skip
    share = (
        row("FP8 share of all FLOPs", "matrix products of the model", lambda v: _share(v.flop_share_pct)),
        row("FP8 share of linear layers", "by FLOPs", lambda v: _share(v.linear_share_pct)),
        row("Cost of watching", "by how much longer the steps took", lambda v: _share(v.watch_pct)),
    )
    columns = tuple(t.name for t in twins) + tuple(v.name for v in verdict.variants)
    blocks = (
        Block("Is it safe?", tuple(safe)),
        Block("Is it worth it?", worth),
        Block("How much of it was FP8?", share),
    )
    return Summary(columns, blocks)


def gap_note(v: VariantVerdict) -> str:
    """What the gap beside its band means, in a few words."""
    if v.gap_pct is None:
        return "no step in common"
    if v.outcome == "unjudged":
        return "not judged"
    if v.band_pct is None:
        return "chance unknown: no noise twin"
    return "inside the noise band" if abs(v.gap_pct) <= v.band_pct else "outside the noise band"


def _window(verdict: Verdict) -> str:
    windows = {v.window for v in verdict.variants if v.window}
    if len(windows) != 1:
        return "the last quarter"
    first, last = next(iter(windows))
    return f"steps {first:,}–{last:,}" if last > first else f"step {first:,}"


def _gap(v: VariantVerdict) -> Cell:
    return Cell(words.percent(v.gap_pct), gap_note(v), warn=v.outcome == "fail")


def _twin_loss(twin: TwinFacts, verdict: Verdict) -> Cell:
    band = next((v.band_pct for v in verdict.variants if v.band_pct is not None), None)
    if twin.name != verdict.baseline.name and band is not None:
        return Cell(f"±{words.percent(band, signed=False)}", "what chance makes")
    return Cell(words.loss(twin.final_loss), "its loss")


def _same_loss(v: VariantVerdict) -> Cell:
    if not v.same_weights:
        return Cell(words.NONE, "not measured")
    worst = max((s.loss_gap_pct for s in v.same_weights), key=abs)
    number = len(v.same_weights)
    return Cell(words.percent(worst), f"{number} snapshot" + "s" * (number > 1))


def _same_cosine(v: VariantVerdict) -> Cell:
    return Cell(words.cosine(min((s.grad_cosine for s in v.same_weights), default=None)))


def _eval_label(verdict: Verdict) -> str:
    name = next((v.eval_name for v in verdict.variants if v.eval_name), "")
    return f"Gap in {name}" if name else "Evaluation"


def _eval(v: VariantVerdict) -> Cell:
    if not v.eval_name or v.eval_gap_pct is None:
        return Cell(words.NONE, "not evaluated")
    band = "" if v.eval_band_pct is None else f"noise band ±{words.percent(v.eval_band_pct, signed=False)}"
    return Cell(words.percent(v.eval_gap_pct), band)


def _count(number: int) -> Cell:
    return Cell(f"{number:,}", warn=number > 0)


def _skipped(run: TwinFacts | VariantVerdict) -> Cell:
    return Cell(f"{run.skipped_steps:,}")  # no warning: a loss scale that looks for its height does so


def _end(run: TwinFacts | VariantVerdict) -> Cell:
    if not run.exit_code and not run.error:
        return Cell("complete")
    return Cell(f"at step {run.steps:,}", f"exit code {run.exit_code}", warn=True)


def _step(v: VariantVerdict, emulated: bool) -> Cell:
    if v.step_seconds is None:
        return Cell(words.NONE)
    speed = f"{v.speedup:.2f}× the baseline's speed" if v.speedup else ""
    return Cell(words.seconds(v.step_seconds), EMULATED if emulated else speed)


def _memory(v: VariantVerdict, baseline: TwinFacts) -> Cell:
    if not v.peak_memory_bytes or not baseline.peak_memory_bytes:
        return Cell(words.memory(v.peak_memory_bytes))
    change = 100 * (v.peak_memory_bytes / baseline.peak_memory_bytes - 1)
    return Cell(words.memory(v.peak_memory_bytes), words.percent(change))


def _share(pct: float | None) -> Cell:
    return Cell(words.percent(pct, signed=False))
