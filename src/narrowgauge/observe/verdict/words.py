"""The verdict's sentences. Plain, complete, with the number that each one rests on."""

from __future__ import annotations

import math
from collections.abc import Collection

from narrowgauge.observe.verdict.gap import CLEAN_LENGTH, FEWEST_STEPS, PASS_PCT
from narrowgauge.observe.verdict.keeping import keep_high
from narrowgauge.observe.verdict.types import VariantVerdict
from narrowgauge.observe.verdict.worst import NOTHING


def other_weights(name: str) -> str:
    """The runs cannot be compared: they started from different weights."""
    return (
        f"Not judged: the {name} run started from other weights than the baseline, so their losses cannot be paired. "
        "Seed the model's initialization from torch, numpy or random, which every run seeds alike. A script that "
        "resumes finds the checkpoint that the run before it wrote: have it start afresh, or give it a new folder."
    )


def other_data(name: str, step: int, models: int = 1) -> str:
    """The runs cannot be compared: they saw different data."""
    copied = " An input computed from another model's output counts as data, too." if models > 1 else ""
    return (
        f"Not judged: from step {step} on the {name} run saw other data than the baseline, so their losses cannot be "
        f"paired. Make the order of the data depend on a seed alone, not on time, process or threads.{copied}"
    )


def other_microbatches(name: str, step: int) -> str:
    """The runs cannot be compared: a step's loss is of more microbatches in one than in the other."""
    return (
        f"Not judged: in step {step} the {name} run called backward another number of times than the baseline, so "
        "their losses are sums of different things. Have it called as often, whatever layers and losses are."
    )


def not_finite(nan_steps: int, steps: int, began: str = "") -> str:
    """The baseline itself went wrong, so nothing can be held against FP8."""
    return (
        f"Not judged: {nan_steps} of {steps} steps of the baseline itself had a loss or gradient that is not finite. "
        f"{began}{' ' if began else ''}Make it train as written first."
    )


def near_zero(first: float, last: float) -> str:
    """A note: relative gaps of a loss that has all but vanished are large by nature."""
    return (
        f"The baseline's loss fell from {first:.3g} to {last:.3g}: gaps in percent of so small a number are large by "
        "nature. Judge by a task that is not learned by heart."
    )


def evaluations_left_out(lost: int, evaluations: int) -> str:
    """A note: what the baseline's evaluation has no number of is held against nobody."""
    return (
        f"The baseline's own evaluation loss is not finite in {lost} of {evaluations} evaluations, by which no "
        "recipe is judged: batches without a target, say, have the mean of nothing, which is NaN."
    )


def other_length(name: str, steps: int, baseline: int) -> str:
    """A note: one run ended by itself in another step, as one that stops where its evaluation no longer falls."""
    return (
        f"The {name} run ended by itself after {steps} steps, the baseline after {baseline}: they are held against "
        "each other, evaluations too, where both have been."
    )


def percent(value: float) -> str:
    """A signed percentage with three significant digits."""
    return f"{value:+.3g}%"


def sentence(v: VariantVerdict) -> str:
    """Safe or not, and worth it or not, in one or two sentences."""
    return f"{_safe(v)} {_worth(v)}".strip()


def _safe(v: VariantVerdict) -> str:
    if v.outcome == "unjudged" and v.error:
        return f"Not judged: {v.error}"
    if v.exit_code:
        why = v.error.rstrip(".") or f"exit code {v.exit_code}"
        return f"Not safe: the run ended with an error after {v.steps} steps ({why})."
    if v.nan_steps:
        return f"Not safe: {v.nan_steps} of {v.steps} steps had a loss or gradient that is not finite."
    if v.gap_pct is None:
        return "Not judged: the run and the baseline have no step in common."
    gap = f"the loss is {percent(v.gap_pct)} against the baseline"
    band = f", chance alone makes ±{v.band_pct:.3g}%" if v.band_pct is not None else ""
    if v.outcome == "pass":
        return f"Safe over these {v.steps} steps: {gap}{band}.{_same(v)}"
    if v.outcome == "inconclusive":
        few = " So few steps decide nothing." if v.steps < FEWEST_STEPS else ""
        lower = " A lower loss is no harm, and one batch shows no fault." if _lower(v) and not few else ""
        return f"Not known yet, inconclusive at {v.steps} steps: {gap}{band}.{few}{lower}{_same(v)}"
    grade = "Watch it" if v.outcome == "watch" else "Not safe"
    lower = "; a loss lower than the baseline's is as suspicious as a higher one" if _lower(v) else ""
    return f"{grade}: {gap}{band}{lower}.{_evaluation_reason(v)}{_same(v)}"


def _lower(v: VariantVerdict) -> bool:
    """Whether the loss is lower than chance and the limit explain."""
    return v.gap_pct is not None and v.gap_pct < -max(PASS_PCT, v.band_pct or 0.0)


def _evaluation_reason(v: VariantVerdict) -> str:
    if v.eval_gap_pct is not None and math.isnan(v.eval_gap_pct):
        return " The evaluation loss is not finite, and the baseline's is."
    gap = v.gap_pct or 0.0
    worse = gap < 0 and (v.eval_gap_pct or 0.0) > PASS_PCT  # however low the loss is
    if v.eval_gap_pct is None or not (worse or abs(v.eval_gap_pct) > abs(gap)):
        return ""
    return f" The evaluation loss is {percent(v.eval_gap_pct)}."


def _same(v: VariantVerdict) -> str:
    if not v.same_weights:
        return ""
    loss = max((s.loss_gap_pct for s in v.same_weights), key=abs)
    cosine = min(s.grad_cosine for s in v.same_weights)
    length = max((s.grad_norm_ratio for s in v.same_weights), key=lambda ratio: abs(ratio - 1.0))
    # Beside a loss that is small already, rounding alone moves the residual, and the gradient with it.
    scaled = (
        f", and its length is {length:.3g} times the baseline's: by a wrong or stale scale where a tensor's gain is "
        "off 1 by more than 3%, else by rounding, as beside a small loss"
    )
    return (
        f" At the same weights and batch the loss differs by {percent(loss)} at most, "
        f"gradient cosine {cosine:.4f} or more{scaled if abs(length - 1.0) > CLEAN_LENGTH else ''}."
    )


def _worth(v: VariantVerdict) -> str:
    if v.exit_code:
        return ""
    if v.speedup is None and v.safe == "no":
        return "Not worth it, however fast, while it is not safe."
    if v.speedup is None:
        return "Its products were emulated here, which says nothing of speed: whether it is worth it is not known."
    faster = f"{v.speedup:.2f}x the baseline's speed"
    if v.worth_it == "yes":
        return f"Worth it: {faster}."
    if v.safe == "no":
        return f"It runs at {faster}, which is worth nothing while it is not safe."
    if v.worth_it == "no":
        return f"Not worth it: {faster}."
    return f"It runs at {faster}."


def nothing_in_fp8(never_called: str) -> str:
    """Why a run whose converted layers did nothing says nothing of its recipe."""
    return f"Not judged: nothing ran in FP8, for what the program multiplies by is not its layers: {never_called}"


def next_step(v: VariantVerdict, why_not: str, models: int = 1, nothing: str = "", failed: Collection[str] = ()) -> str:
    """What to try next.

    `models` is how many the program has, `nothing` why nothing ran in FP8, `failed` which recipes did beside this one.
    """
    if why_not:
        return "Do that first, then compare again."
    if nothing:
        return "Call the layers in place of a function of their weights (self.up(x), not F.linear(x, self.up.weight))."
    if v.outcome == "unjudged":
        return "Leave this recipe out, or change what it was asked to convert."
    if v.exit_code:
        return "Read the end of this run's output.log."
    remedy = next((w for w in v.worst if w.remedy != NOTHING), None)
    help_worst = f"For {remedy.site}: {remedy.remedy}." if remedy else keep_high(v.conversion, v.recipe, models, failed)
    if v.nan_steps or v.outcome == "fail":
        return help_worst
    if v.outcome == "watch":
        return f"Run longer before you trust it. {help_worst}"
    if v.outcome == "inconclusive":
        many = 4 * max(v.steps, FEWEST_STEPS)  # `--steps` only ends a program earlier
        longer = f"Run longer (some {many} steps, by the program's own setting)"
        return f"{longer}: the band of chance narrows as the run grows."
    if v.speedup is None:
        return "Compare on a GPU with FP8 hardware to see the speed."
    if v.worth_it == "no":
        return "Larger layers or batches gain more; leave the small layers in the baseline's precision."
    return "Train with it, and keep the watch on."
