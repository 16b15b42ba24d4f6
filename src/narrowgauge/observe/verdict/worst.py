"""Which tensors lose most in FP8, and which number says so.

Each sign is one metric with the value from which it matters; a site's badness is how far its median over the recorded
steps of the last half goes beyond that value, in multiples of it (in steps of 6 dB for decibels). A site beyond none
of them is listed by its SQNR, as healthy. A product that is too small because an operand lost what it was made of (an
outlier channel flushed the others, a stale scale clipped them) is told behind that operand, with its remedy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from narrowgauge.observe.store import Run
from narrowgauge.observe.verdict.high import stays_high
from narrowgauge.observe.verdict.remedies import HIGH, fitting
from narrowgauge.observe.verdict.types import WorstTensor

WORST = 5
DB_PER_BIT = 6.02
BEHIND = 0.999  # of an operand's badness: that of a product that it spoils
LOSSLESS_DB = 1e6  # where no noise is left: in the order of tensors, behind all others


@dataclass(frozen=True)
class Sign:
    """One metric, how bad a value of it is (> 1 matters), what it means and what helps."""

    metric: str
    badness: Callable[[float], float]
    why: str
    remedies: tuple[str, ...]


def _above(limit: float) -> Callable[[float], float]:
    return lambda value: value / limit


def _below_db(limit: float) -> Callable[[float], float]:
    return lambda value: 1.0 + (limit - value) / DB_PER_BIT


def _off_one(limit: float) -> Callable[[float], float]:
    return lambda value: abs(value - 1.0) / limit


OPERANDS = {  # of each result
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
COUNTS = ("nan_count", "inf_count")
FIND = ("mend what had them first",)  # which `began` says
SIGNS = (
    Sign("nan_count", _above(0.5), "{value:.0f} elements are NaN.", FIND),
    Sign("inf_count", _above(0.5), "{value:.0f} elements are infinite.", FIND),
    Sign(
        "gemm_gain",
        _off_one(0.03),
        "The product is {value:.4f} times what it should be: a scale that does not belong to its tensor.",
        ("check the pairing of codes and scales; report it, this is a bug",),
    ),
    Sign(
        "gain",
        _off_one(0.03),
        "Dequantized values are {value:.4f} times the originals.",
        ("current scaling", "a scale that belongs to this tensor"),
    ),
    Sign(
        "saturation_pct",
        _above(0.1),
        "{value:.3g}% of its elements exceed the format's range: the scale is too small for it.",
        ("current scaling", "a margin", "mxfp8, whose scales are rounded up"),
    ),
    Sign(
        "lost_energy_pct",
        _above(0.1),
        "{value:.3g}% of its energy is flushed to zero: the range is too small for it.",
        ("E5M2", "blockwise scaling"),
    ),
    Sign(
        "amax_ratio",
        _above(2.0),
        "It is {value:.3g} times as large as its delayed scale assumed.",
        ("current scaling", "a margin"),
    ),
    Sign(
        "p5_col_sqnr_db",
        _below_db(20.0),
        "The worst twentieth of its channels is represented at {value:.1f} dB or less: outlier channels.",
        ("blockwise scaling",),
    ),
    Sign(
        "p5_row_sqnr_db",
        _below_db(20.0),
        "The worst twentieth of its rows is represented at {value:.1f} dB or less: outlier tokens.",
        ("rowwise scaling", "blockwise scaling"),
    ),
    Sign(
        "sqnr_db",
        _below_db(22.0),
        "Quantization noise is only {value:.1f} dB below the signal.",
        ("a finer granularity", HIGH),
    ),
)
HEALTHY = "Healthy: {value:.1f} dB of signal over quantization noise, among the lowest; no sign of trouble."
EXACT = "Healthy: the recipe loses nothing of it."
NOTHING = "nothing to do"


def worst_tensors(
    run: Run,
    count: int = WORST,
    steps: Mapping[str, Sequence[int]] | None = None,
    of: Callable[[str], bool] | None = None,
) -> tuple[WorstTensor, ...]:
    """The `count` worst sites of a run, worst first; fewer if it recorded fewer.

    Args:
        run: whose.
        count: how many at most.
        steps: of each site by these, instead of the recorded steps of the last half; other sites are left out.
        of: which sites; None: all that were in FP8, or all if the run converted nothing (`high.stays_high`).
    """
    high, recipe = stays_high(run.metas), str(run.meta.get("recipe") or "")
    of = of or (steps.__contains__ if steps is not None else lambda site: not high(site))
    metrics = [sign.metric for sign in SIGNS if sign.metric in run.metrics]
    if not metrics:
        return ()
    table = run.tensors(columns=metrics, steps=None if steps is None else every_step(steps))
    sites, made = np.asarray(table["site"]), np.asarray(table["step"])
    if made.size == 0:
        return ()
    recent = made >= np.median(np.unique(made))
    found: dict[str, dict[str, float]] = {}
    for site in filter(of, map(str, np.unique(sites))):
        chosen = sites == site
        chosen &= recent if steps is None else np.isin(made, steps.get(site, ()))
        if chosen.any():
            found[site] = {m: _median(table[m][chosen], whole=m in COUNTS) for m in metrics}
    judged = {site: _judge(site, values, recipe) for site, values in found.items()}
    rows = [_by_operand(site, judged, found) for site in judged]
    rows = [row for row in rows if np.isfinite(row[0])]
    rows.sort(key=lambda row: (-row[0], row[1].site))
    return tuple(tensor for _, tensor in rows[:count])


def every_step(steps: Mapping[str, Sequence[int]]) -> list[int]:
    """All steps that any site has, ascending."""
    return sorted({step for its in steps.values() for step in its})


def _judge(site: str, values: dict[str, float], recipe: str) -> tuple[float, WorstTensor]:
    worst, sign = -np.inf, None
    for candidate in SIGNS:
        value = values.get(candidate.metric, float("nan"))
        badness = candidate.badness(value) if np.isfinite(value) else -np.inf
        if badness > 1.0 and badness > worst:
            worst, sign = badness, candidate
    if sign is not None:
        value = values[sign.metric]
        return worst, WorstTensor(
            site, sign.metric, value, sign.why.format(value=value), fitting(sign.remedies, recipe)
        )
    sqnr = values.get("sqnr_db", float("nan"))
    # Below every sign of trouble (badness < 1), ordered by SQNR; results have none and are left out.
    said = EXACT if sqnr == np.inf else HEALTHY.format(value=sqnr)
    healthy = WorstTensor(site, "sqnr_db", sqnr, said, NOTHING)
    return (-np.inf if np.isnan(sqnr) else -min(sqnr, LOSSLESS_DB) / 1000.0), healthy


def _by_operand(
    site: str, judged: Mapping[str, tuple[float, WorstTensor]], found: Mapping[str, Mapping[str, float]]
) -> tuple[float, WorstTensor]:
    """What was judged of a site; a product that is too small is its operand's fault, where that lost enough."""
    badness, worst = judged[site]
    if worst.metric != "gemm_gain" or not worst.value < 1.0:
        return badness, worst
    module, _, role = site.rpartition(":")
    operands = [f"{module}:{each}" for each in OPERANDS.get(role, ())]
    guilty = [each for each in operands if each in judged and _lost_much(found[each])]
    if not guilty:
        return badness, worst
    most, operand = max((judged[each] for each in guilty), key=lambda row: row[0])
    why = f"The product is {worst.value:.4f} times what it should be, by what {operand.site} lost."
    return min(badness, BEHIND * most), replace(worst, why=why, remedy=operand.remedy)


def _lost_much(values: Mapping[str, float]) -> bool:
    """Whether an operand's codes are so much smaller than it that a product of them is too small."""
    ratios = [values.get(metric, np.nan) for metric in ("sqnr_db", "p5_row_sqnr_db", "p5_col_sqnr_db")]
    return (
        values.get("gain", 1.0) < 0.97
        or values.get("saturation_pct", 0.0) > 0.1
        or values.get("lost_energy_pct", 0.0) > 0.1
        or any(ratio < DB_PER_BIT for ratio in ratios)  # the error is half as large as what was there
    )


def _median(values: np.ndarray, *, whole: bool = False) -> float:
    """Of what is defined; `whole`: of an even number the higher of the middle two, which some step had."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all NaN: the metric was never defined there
        found = np.asarray(values, dtype=np.float64)
        if whole:
            return float(np.nanquantile(found, 0.5, method="higher"))
        middle = float(np.nanmedian(found))
        # Exact in some steps is not exact.
        return (
            middle
            if np.isfinite(middle) or not np.isfinite(found).any()
            else float(np.median(found[np.isfinite(found)]))
        )
