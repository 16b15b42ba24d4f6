"""Which pictures a report has, made from its runs: the only place where gathered arrays meet figures.

A picture without data is not drawn; the template then says what is missing and why. One colour per run everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from bokeh.models import Range1d

from narrowgauge.formats import CATALOG, Format, by_name
from narrowgauge.metrics import OPERAND_ROLES, Site
from narrowgauge.observe import figures
from narrowgauge.observe.report import gather
from narrowgauge.observe.report.layout import Pictures
from narrowgauge.observe.store import Run
from narrowgauge.observe.verdict.types import Verdict, WorstTensor

HYBRID = ("current", "delayed", "static")  # recipes whose gradients are E5M2


@dataclass(frozen=True)
class Tensor:
    """One of the worst tensors and the place of its histogram ("" where it has none)."""

    rank: int
    facts: WorstTensor
    place: str
    step: int = 0
    format: str = ""
    many_scales: bool = False


def losses(pictures: Pictures, runs: Mapping[str, Run], colors: Mapping[str, str], verdict: Verdict | None) -> None:
    """Places "loss", "gap" and "eval", as far as there is something to draw."""
    traces = {name: gather.trace(name, run, colors[name]) for name, run in runs.items()}
    drawn = [t for t in traces.values() if np.isfinite(t.values).any()]
    if not drawn:
        return
    x_range = figures.shared_steps(list(traces.values()))
    curves = [part for name, t in traces.items() if len(t.steps) for part in gather.by_turn(runs[name], t)]
    pictures.add("loss", figures.loss_curves(curves, x_range))
    baseline = traces.get("baseline")
    others = [t for name, t in traces.items() if name not in ("baseline", "noise") and np.isfinite(t.values).any()]
    if baseline is None or not np.isfinite(baseline.values).any() or not others:
        return
    judged = {v.name: v for v in verdict.variants} if verdict and verdict.judged else {}
    band = next((v.band_pct for v in judged.values() if v.band_pct is not None), None)
    means = {
        name: (v.window, v.gap_pct)
        for name, v in judged.items()
        if v.window and v.gap_pct is not None and v.outcome != "unjudged"
    }
    pictures.add(
        "gap", figures.loss_gap(baseline, others, x_range, noise=traces.get("noise"), band_pct=band, means=means)
    )


def same_weights(pictures: Pictures, verdict: Verdict, colors: Mapping[str, str]) -> None:
    """Place "gradients": per-layer gradient errors of the last snapshot of each variant that has them, if any errs."""
    rows = {v.name: v.same_weights[-1].layers for v in verdict.variants if v.same_weights and v.same_weights[-1].layers}
    if any(error > 0 for layers in rows.values() for _, _, error in layers):
        pictures.add("gradients", figures.gradient_errors(rows, colors))


def inside(
    pictures: Pictures,
    layers: gather.Layers,
    colors: Mapping[str, str],
    worst: Mapping[str, Sequence[WorstTensor]],
    shown: str,
) -> None:
    """Places "heat-METRIC" and "scale-ROLE": everything over layers and steps; `shown`: "variant|role" drawn first."""
    if not layers.names:
        return
    spacing = float(np.median(np.diff(layers.steps))) if len(layers.steps) > 1 else 1.0
    x_range = Range1d(float(layers.steps[0]) - spacing / 2, float(layers.steps[-1]) + spacing / 2)
    y_range = Range1d(0, len(layers.names))
    variant = shown.rpartition("|")[0]
    for metric in figures.METRICS:
        grids = layers.grids[metric.column]
        if shown in grids:
            picture = figures.heatmap(
                metric, layers.names, layers.steps, grids, shown=shown, x_range=x_range, y_range=y_range
            )
            pictures.add(f"heat-{metric.column}", picture)
    modules = {
        (v, r): [Site.parse(t.site).module for t in tensors if Site.parse(t.site).role == r]
        for v, tensors in worst.items()
        for r in OPERAND_ROLES
    }
    scale_range = figures.scale_steps(layers.steps)
    for each in OPERAND_ROLES:
        scales = {
            v: layers.grids["scale_max"][f"{v}|{each}"]
            for v in layers.variants
            if f"{v}|{each}" in layers.grids["scale_max"]
        }
        if variant in scales:
            named = {v: modules.get((v, each), ())[:3] for v in scales}
            pictures.add(
                f"scale-{each}",
                figures.scale_traces(
                    scales, layers.steps, layers.names, colors=colors, named=named, shown=variant, x_range=scale_range
                ),
            )


def worst_tensors(
    pictures: Pictures, variant: str, run: Run | None, tensors: Sequence[WorstTensor], color: str
) -> tuple[Tensor, ...]:
    """Places "exponents-VARIANT-RANK" for the worst tensors of one run that have a histogram."""
    result = []
    for rank, facts in enumerate(tensors[:5], start=1):
        found = gather.histogram(run, facts.site) if run is not None else None
        if run is None or found is None or not found.counts.sum():
            result.append(Tensor(rank, facts, ""))
            continue
        fmt = format_of(run, Site.parse(facts.site).role)
        picture = figures.exponent_histogram(
            found.counts, found.exponents, found.inv_scale, fmt, color=color, clipped=found.clipped
        )
        place = pictures.add(f"exponents-{variant}-{rank}", picture)
        result.append(Tensor(rank, facts, place, found.step, fmt.name, found.many_scales))
    return tuple(result)


def format_of(run: Run, role: str) -> Format:
    """The number format of a role in a run: as its metadata say, else as its recipe's name implies."""
    stated = run.meta.get("formats")
    if isinstance(stated, Mapping) and str(stated.get(role, "")).upper() in CATALOG:
        return by_name(str(stated[role]))
    named = run.meta.get("recipe") or run.meta.get("judged_by") or run.meta.get("variant") or ""
    recipe = str(named).removeprefix("fake-")
    hybrid = role == "grad_output" and recipe.split("-")[0] in HYBRID
    return by_name("E5M2" if hybrid else "E4M3FN")
