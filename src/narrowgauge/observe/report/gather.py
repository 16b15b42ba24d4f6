"""Runs as the arrays that pictures take: losses per run, and every metric of every layer on one common grid.

    grids["variant|role"][metric]   [L, T] float32      L layers in forward order, T recorded steps of all runs together

Cells nobody recorded are NaN. A long run has more steps than a screen has columns: neighbours are then merged into
one cell that keeps the *worst* of them (most underflow, least SQNR, gain farthest from 1, largest scale), never a
mean, so an event of one step stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.metrics import OPERAND_ROLES, Site, exponent_of_bin
from narrowgauge.metrics.site import natural
from narrowgauge.observe.figures import METRICS, Trace
from narrowgauge.observe.report.steps import turns
from narrowgauge.observe.store import Run
from narrowgauge.observe.verdict.high import stays_high

CELLS = 420_000  # of all grids together: keeps the page near 3 MB
MOST_COLUMNS = 240
Array = NDArray[Any]


@dataclass(frozen=True)
class Layers:
    """Every metric of every layer: `names` [L], `steps` [T], `grids` by (metric, "variant|role") -> [L, T]."""

    names: tuple[str, ...] = ()
    steps: Array = field(default_factory=lambda: np.zeros(0))
    grids: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    merged: int = 1  # recorded steps per column
    by_name: bool = False  # nobody told in which order they run

    def roles(self, variant: str = "") -> list[str]:
        """Those that a variant has rows of; without a name, any of them."""
        of = [variant] if variant else self.variants
        known = {key for grids in self.grids.values() for key in grids}
        return [role for role in OPERAND_ROLES if any(f"{name}|{role}" in known for name in of)]


@dataclass(frozen=True)
class Histogram:
    """One tensor's exponents at one step, and the (largest) scale that it was quantized with.

    `many_scales`: its scales differ by a power of two or more, so that one shift does not place all of them.
    """

    step: int
    counts: Array  # [B], zeros left out
    exponents: Array  # [B]
    inv_scale: float
    zero_pct: float
    many_scales: bool
    clipped: bool  # whether any element exceeds the format's range, as far as is known


def trace(name: str, run: Run, color: str, scalar: str = "loss") -> Trace:
    """A scalar of one run over its steps; empty when it was never recorded."""
    if scalar not in run.scalar_names:
        return Trace(name, color, np.zeros(0), np.zeros(0))
    table = run.scalars(scalar)
    values = np.asarray(table[scalar], dtype=np.float64)
    return Trace(
        name, color, np.asarray(table["step"], dtype=np.float64), np.where(np.isfinite(values), values, np.nan)
    )


def by_turn(run: Run, whole: Trace) -> list[Trace]:
    """A run's trace as one, or as one of each turn where it trained in turns."""
    table = run.scalars()
    parts = turns(table)
    if len(parts) == 1:
        return [whole]
    steps = np.asarray(table["step"], dtype=np.float64)
    chosen = [(turn, np.isin(whole.steps, steps[part])) for turn, part in parts]
    return [Trace(f"{whole.name}, {turn}", whole.color, whole.steps[rows], whole.values[rows]) for turn, rows in chosen]


def layers(runs: Mapping[str, Run], order: Sequence[str] = ()) -> Layers:
    """The common grid of all runs that recorded operands; of one that converted, of those in FP8.

    `order`: module names in forward order, as far as known.
    """
    found: dict[tuple[str, str, str], tuple[list[str], Array, Array]] = {}
    for name, run in runs.items():
        metrics, high = set(run.metrics), stays_high(run.metas)
        for metric in METRICS:
            if metric.column not in metrics:
                continue
            for role in OPERAND_ROLES:
                sites, steps, values = run.heatmap(metric.column, role)
                shown = [row for row, site in enumerate(sites) if not high(str(site))]
                if len(steps) and shown:
                    modules = [Site.parse(sites[row]).module for row in shown]
                    found[name, metric.column, role] = (modules, steps, values[shown])
    if not found:
        return Layers()
    seen = {module for modules, _, _ in found.values() for module in modules}
    names = [m for m in dict.fromkeys(order) if m in seen]
    names += sorted(seen - set(names), key=natural)
    steps = np.unique(np.concatenate([steps for _, steps, _ in found.values()]))
    variants = tuple(dict.fromkeys(name for name, _, _ in found))
    columns = int(np.clip(CELLS // (len(METRICS) * len(OPERAND_ROLES) * len(variants) * len(names)), 24, MOST_COLUMNS))
    merged = max(math.ceil(len(steps) / columns), 1)
    row_of = {module: row for row, module in enumerate(names)}
    grids: dict[str, dict[str, Array]] = {metric.column: {} for metric in METRICS}
    for (name, metric_name, role), (modules, at, values) in found.items():
        grid = np.full((len(names), len(steps)), np.nan)
        grid[np.ix_(np.array([row_of[m] for m in modules]), np.searchsorted(steps, at))] = values
        grids[metric_name][f"{name}|{role}"] = _short_mantissa(merge_columns(_held(grid), merged, metric_name))
    return Layers(tuple(names), steps[::merged].astype(np.float64), grids, variants, merged, not seen.issubset(order))


def _held(grid: Array) -> Array:
    """[L, T] -> [L, T]: a layer that is in every second or third recorded step keeps its value until its next one.

    So a model that trains in turns with another has rows without holes; a gap longer than usual stays one.
    """
    grid = grid.copy()
    for row in grid:
        at = np.flatnonzero(~np.isnan(row))
        between = np.diff(at)
        if not len(at) or not len(between):
            continue
        usual = 1.5 * float(np.median(between))
        for start, length in zip(at[:-1], between, strict=True):
            if 1 < length <= usual:
                row[start + 1 : start + length] = row[start]
    return grid


def merge_columns(grid: Array, merged: int, metric: str) -> Array:
    """Join every `merged` neighbouring columns, [L, T] -> [L, ceil(T / merged)], keeping the worst value of each."""
    if merged == 1:
        return grid
    pad = -grid.shape[1] % merged
    cells = np.pad(grid, ((0, 0), (0, pad)), constant_values=np.nan).reshape(len(grid), -1, merged)
    badness = {"sqnr_db": -cells, "gain": np.abs(cells - 1)}.get(metric, cells)
    worst = np.where(np.isnan(badness), -np.inf, badness).argmax(-1)
    return np.take_along_axis(cells, worst[..., None], -1)[..., 0]


def _short_mantissa(values: Array) -> Array:
    """float32 with the last 10 of its 23 mantissa bits cleared (4 digits stay): the page compresses them away."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(1 << 9)) & np.uint32(0xFFFFFC00)).view(np.float32)
    return np.where(np.isfinite(values), rounded, np.nan).astype(np.float32)


def histogram(run: Run, site: str) -> Histogram | None:
    """The newest exponent histogram of a site with its scale; None where none was recorded."""
    known = set(run.metrics)
    if not {"exponent_histogram", "scale_max"} <= known:
        return None
    asked = ["exponent_histogram", "scale_max", "scale_min", *({"saturation_pct"} & known)]
    found = run.tensors(columns=asked, sites=[site])
    rows = [row for row, counts in enumerate(found["exponent_histogram"]) if counts is not None]
    if not rows:
        return None
    scaled = [row for row in rows if np.isfinite(found["scale_max"][row])]  # zeros alone have no scale, and no shape
    last = (scaled or rows)[-1]  # where ranks have rows of their own, one of them: counts and scale belong together
    scale, smallest = float(found["scale_max"][last]), float(found["scale_min"][last])
    all_counts = np.asarray(found["exponent_histogram"][last], dtype=np.float64)
    exponents = np.asarray(exponent_of_bin(), dtype=np.float64)[: len(all_counts)]
    total = all_counts.sum()
    zero = 100 * all_counts[0] / total if total else 0.0
    inv_scale = 1 / scale if math.isfinite(scale) and scale > 0 else 1.0
    step, many = int(found["step"][last]), 2 * smallest <= scale
    clipped = "saturation_pct" not in known or float(found["saturation_pct"][last]) != 0  # NaN: nobody could count
    return Histogram(step, all_counts[1:], exponents[1:], inv_scale, float(zero), many, clipped)
