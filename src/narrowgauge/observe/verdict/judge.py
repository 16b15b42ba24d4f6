"""From recorded runs to a verdict.

For each FP8 variant three questions are asked in turn, and a later one never whitewashes an earlier one:

    did it see the same data, from the same weights?      if not, nothing is judged
    does its loss leave the band of chance, by how much?  gap.py; the same for the evaluation loss
    what does one batch at the same weights say?          no chance in it, so it speaks where the first is inconclusive
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from narrowgauge.observe.verdict import words
from narrowgauge.observe.verdict.converted import label
from narrowgauge.observe.verdict.evidence import Evidence, first_difference
from narrowgauge.observe.verdict.gap import (
    CLEAN_LENGTH,
    FEW_T,
    FEWEST_STEPS,
    PASS_PCT,
    QUARTER,
    STUDENT_T,
    Gap,
    common,
    noise_band,
    outcome_of,
    paired_gap,
    relative,
)
from narrowgauge.observe.verdict.types import (
    Answer,
    Outcome,
    SameWeights,
    VariantVerdict,
    Verdict,
)
from narrowgauge.observe.verdict.worst import worst_tensors

SEVERITY: dict[Outcome, int] = {"unjudged": 0, "pass": 1, "inconclusive": 2, "watch": 3, "fail": 4}
SAFE: dict[Outcome, Answer] = {"pass": "yes", "fail": "no"}
# A speed-up below this is not worth a change of precision; above the second it is.
NOT_WORTH, WORTH = 1.02, 1.05
# At the same weights: a forward loss off by more than this is a bug; gradients less alike than this are not the same.
SAME_LOSS_PCT, SAME_COSINE, CLEAN_COSINE = 1.0, 0.9, 0.98
# A cosine sees no wrong scale, the gradient's length does. Noise that these cosines allow adds 11% and 2% to it.
SAME_LENGTH = 0.15
# A loss below this share of its first value has all but vanished.
NEAR_ZERO = 1e-3


def judge(
    baseline: Evidence,
    noise: Evidence | None,
    variants: Mapping[str, Evidence],
    same_weights: Mapping[str, tuple[SameWeights, ...]],
) -> Verdict:
    """Judge every variant against the baseline; `same_weights` by variant name."""
    meta = baseline.meta
    why_not = _comparable(baseline, noise) or _baseline_broken(baseline)
    found = [
        _judge_variant(name, run, baseline, noise, same_weights.get(name, ()), why_not)
        for name, run in variants.items()
    ]
    failed = {v.recipe.removeprefix("fake-") for v, _ in found if v.outcome == "fail"}
    judged = tuple(replace(v, next_step=advised(failed=failed)) for v, advised in found)
    notes = _near_zero(baseline) + _evaluations_left_out(baseline)
    if not why_not:
        notes += _other_lengths(baseline, [*([noise] if noise else []), *variants.values()])
    notes += [note for run in (baseline, *variants.values()) for note in run.meta.get("notes", [])]
    notes += [f"The {run.name} run: {note}" for run in variants.values() for note in _never_called(run)]
    return Verdict(
        command=str(meta.get("command", "")),
        steps=baseline.steps,
        judged=not why_not and any(v.outcome != "unjudged" for v in judged),
        why_not=why_not,
        emulated=bool(meta.get("emulated", True)),
        hardware=str(meta.get("hardware", "")),
        baseline=baseline.twin_facts(),
        noise=noise.twin_facts() if noise else None,
        variants=judged,
        notes=tuple(dict.fromkeys(notes)),
        versions=dict(meta.get("versions", {})),
        started=str(meta.get("started", "")),
    )


def _comparable(baseline: Evidence, other: Evidence | None) -> str:
    """Why two runs may not be compared; "" if they may."""
    if other is None or other.run is None or not other.steps:
        return ""
    ours, theirs = baseline.meta.get("weights_hash"), other.meta.get("weights_hash")
    if ours and theirs and ours != theirs:  # a run that was killed early may have left none
        return words.other_weights(other.name)
    step = first_difference(baseline, other)
    if step is not None:
        return words.other_data(other.name, step, int(baseline.meta.get("models", 1)))
    step = first_difference(baseline, other, "microbatches")
    # A run that went wrong may have left some out for that: then how it went wrong is what there is to say.
    broken = other.exit_code or int(other.meta.get("nan_steps", 0))
    return words.other_microbatches(other.name, step) if step is not None and not broken else ""


def _baseline_broken(baseline: Evidence) -> str:
    """Why the baseline is nothing to hold a variant against; "" if it is."""
    values = baseline.series("loss").values
    tail = values[-max(1, values.size // QUARTER) :]
    if np.isfinite(tail).all():
        return ""
    broken = int(baseline.meta.get("nan_steps", 0)) or int((~np.isfinite(values)).sum())
    return words.not_finite(broken, values.size, baseline.began())


def _near_zero(baseline: Evidence) -> list[str]:
    first, last = baseline.series("loss").values[:1], baseline.final_loss()
    if not first.size or last is None or not abs(last) < NEAR_ZERO * abs(first[0]):
        return []
    return [words.near_zero(float(first[0]), last)]


def _evaluations_left_out(baseline: Evidence) -> list[str]:
    values = baseline.series("eval_loss").values
    lost = int((~np.isfinite(values)).sum())
    return [words.evaluations_left_out(lost, values.size)] if lost else []


def _other_lengths(baseline: Evidence, others: Iterable[Evidence]) -> list[str]:
    """Of one that failed its own sentence tells how far it came."""
    whole = [run for run in others if run.steps and not run.exit_code and not run.meta.get("refused")]
    return [words.other_length(run.name, run.steps, baseline.steps) for run in whole if run.steps != baseline.steps]


def _judge_variant(
    name: str,
    run: Evidence,
    baseline: Evidence,
    noise: Evidence | None,
    same: tuple[SameWeights, ...],
    why_not: str,
) -> tuple[VariantVerdict, Callable[..., str]]:
    """What is known of a variant alone, and what says what to try next once the others are known, too."""
    why_not = why_not or _comparable(baseline, run)
    loss = baseline.series("loss")
    gap = paired_gap(run.series("loss"), loss)
    band = noise_band(noise.series("loss"), loss) if noise else None
    eval_gap, eval_band = _evaluation(run, baseline, noise)
    worst = worst_tensors(run.run) if run.run is not None else ()
    outcome = "unjudged" if why_not else _outcome(run, gap, band, eval_gap, eval_band, same)
    speedup = _speedup(run, baseline)
    meta = run.meta
    safe = SAFE.get(outcome, "unknown")
    nothing = words.nothing_in_fp8(_never_called(run)[0]) if outcome == "unjudged" and _idle(run) else ""
    facts = VariantVerdict(
        name=name,
        recipe=str(meta.get("recipe") or name),
        outcome=outcome,
        safe=safe,
        worth_it=_worth(safe, speedup),
        sentence="",
        next_step="",
        steps=run.steps,
        gap_pct=gap.pct if gap else None,
        band_pct=band,
        window=(gap.first, gap.last) if gap else None,
        same_weights=same,
        same_weights_note="" if same else _no_same_weights(baseline),
        eval_name="eval loss" if eval_gap is not None else "",
        eval_gap_pct=eval_gap,
        eval_band_pct=eval_band,
        eval_value=run.eval_value(),
        step_seconds=run.step_seconds(),
        speedup=speedup,
        tokens_per_second=run.tokens_per_second(),
        peak_memory_bytes=meta.get("peak_memory_bytes"),
        flop_share_pct=_flop_share(run, baseline),
        linear_share_pct=_linear_share(run),
        nan_steps=int(meta.get("nan_steps", 0)),
        skipped_steps=int(meta.get("skipped_steps", 0)),
        watch_pct=run.watch_pct(),
        exit_code=run.exit_code,
        error=run.error,
        worst=worst,
        conversion=run.conversion(),
    )
    advised = partial(words.next_step, facts, why_not, int(meta.get("models", 1)), nothing)
    sentence = why_not or nothing or " ".join(filter(None, (words.sentence(facts), run.began())))
    return replace(facts, sentence=sentence), advised


def _outcome(
    run: Evidence,
    gap: Gap | None,
    band: float | None,
    eval_gap: float | None,
    eval_band: float | None,
    same: tuple[SameWeights, ...],
) -> Outcome:
    if run.meta.get("refused"):
        return "unjudged"
    if run.exit_code or gap is None or int(run.meta.get("nan_steps", 0)):
        return "fail"
    outcome = _of_gap(gap.pct, band, same)
    if eval_gap is not None:
        on_eval = _of_gap(eval_gap, eval_band, same)
        # An inconclusive evaluation is no reason to doubt a conclusive training loss.
        if on_eval != "inconclusive" and SEVERITY[on_eval] > SEVERITY[outcome]:
            outcome = on_eval
    if run.steps < FEWEST_STEPS and outcome in ("pass", "watch"):
        outcome = "inconclusive"
    if same and outcome in ("pass", "inconclusive") and not _plausible(same):
        outcome = "watch"
    if outcome != "fail" and _idle(run):
        return "unjudged"
    return outcome


def _of_gap(pct: float, band: float | None, same: tuple[SameWeights, ...]) -> Outcome:
    outcome = outcome_of(pct, band)
    if outcome in ("watch", "fail") and pct < 0:
        # A lower loss does no harm, but chance or a wrong scale made it: the same weights tell which.
        return "inconclusive" if same and _clean(same) else "watch"
    return outcome


def _plausible(same: tuple[SameWeights, ...]) -> bool:
    return all(_within(s, SAME_LOSS_PCT, SAME_COSINE, SAME_LENGTH) for s in same)


def _clean(same: tuple[SameWeights, ...]) -> bool:
    return all(_within(s, PASS_PCT, CLEAN_COSINE, CLEAN_LENGTH) for s in same)


def _within(s: SameWeights, loss_pct: float, cosine: float, length: float) -> bool:
    return abs(s.loss_gap_pct) <= loss_pct and s.grad_cosine >= cosine and abs(s.grad_norm_ratio - 1.0) <= length


def _evaluation(run: Evidence, baseline: Evidence, noise: Evidence | None) -> tuple[float | None, float | None]:
    """The last common evaluation's gap, and the band from the noise twin's second half of evaluations.

    What the baseline has no number of (an evaluation of batches without a target) is held against nobody.
    """
    base, ours = baseline.series("eval_loss"), run.series("eval_loss")
    steps = np.intersect1d(common(base, base), ours.steps)
    if steps.size == 0:
        return None, None
    last = steps[-1:]
    value = ours.at(last)
    gap = relative(np.where(np.isfinite(value), value, np.nan) - base.at(last), base.at(last))
    if noise is None:
        return gap, None
    twin = noise.series("eval_loss")
    shared = np.intersect1d(steps, common(twin, base))
    shared = shared[shared.size // 2 :]
    if shared.size == 0:
        return gap, None
    gaps = [relative(twin.at(step) - base.at(step), base.at(step)) for step in shared[:, None]]
    return gap, FEW_T.get(len(gaps), STUDENT_T) * float(np.sqrt(np.mean(np.square(gaps))))


def _speedup(run: Evidence, baseline: Evidence) -> float | None:
    ours, theirs = run.step_seconds(), baseline.step_seconds()
    if run.meta.get("emulated", True) or not ours or not theirs:
        return None
    return theirs / ours


def _worth(safe: Answer, speedup: float | None) -> Answer:
    if safe == "no":
        return "no"
    if speedup is None:
        return "unknown"
    if speedup < NOT_WORTH:
        return "no"
    return "yes" if speedup >= WORTH and safe == "yes" else "unknown"


def _flop_share(run: Evidence, baseline: Evidence) -> float | None:
    """Percent of the model's matmul FLOPs, forward and backward, that ran in FP8."""
    flops = baseline.meta.get("flops") or {}
    total, per_layer = flops.get("total"), flops.get("linear") or {}
    # In thirds, as the linear layers' share: what `[[high]]` keeps of a layer is told by the number of its products.
    converted = {
        row["name"]: row.get("fp8_gemms", 3) / 3 for row in run.conversion() if row.get("recipe") and row.get("calls")
    }
    if not total or not per_layer or not converted or int(baseline.meta.get("models", 1)) > 1:
        return None  # of several models, one loss was counted
    return float(100.0 * sum(per_layer.get(name, 0) * part for name, part in converted.items()) / total)


def _linear_share(run: Evidence) -> float | None:
    """Percent of the linear layers' FLOPs, of all models and ranks, that was converted and is not known to be idle."""
    rows = [row for row in run.conversion() if row.get("flops_per_token")]
    total = sum(row["flops_per_token"] for row in rows)
    low = sum(row["flops_per_token"] * row.get("fp8_gemms", 3) / 3 for row in rows if _ran(row))
    return float(100.0 * low / total) if total else None


def _ran(row: Mapping[str, Any]) -> bool:
    return bool(row.get("recipe")) and row.get("calls") != 0


def _idle(run: Evidence) -> bool:
    """Whether layers were converted and none of them was called: then nothing ran in FP8."""
    converted = [row for row in run.conversion() if row.get("recipe")]
    return bool(converted) and not any(map(_ran, converted))


def _no_same_weights(baseline: Evidence) -> str:
    notes = baseline.meta.get("same_weights_notes") or ["it was not measured"]
    return "; ".join(dict.fromkeys(str(note) for note in notes))


def _never_called(run: Evidence) -> list[str]:
    names = [label(r) for r in run.conversion() if r.get("recipe") and r.get("calls") == 0]
    if not names:
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"converted but never called: {shown}."]
