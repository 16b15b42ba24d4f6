"""The pictures of two benchmarks, from the JSON that they leave: `step` by phase, `overhead` by recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.bench.bars_picture import Bar, svg
from narrowgauge.bench.phases import PHASES
from narrowgauge.observe.figures.palette import BAND, MUTED, NOISE, variant_colors

_SHADES = ("data", "#d9d5cd"), ("quantize", "#d55e00"), ("gemm", "#0072b2"), ("attention", "#56a5d6")
_REST = ("rest", MUTED), ("optimizer", NOISE), ("idle", "#f0ede6")
WIDEST = 2.0
PHASE_COLOURS = {name: dict((*_SHADES, *_REST))[name] for name in PHASES}


def phases(found: Mapping[str, Any]) -> str:
    """Where the time of a step goes, a bar per variant; what stands behind it is its speed over BF16.

    Beside a bar of FP32 all others would be of one length: what takes over `WIDEST` times the first row's time is told
    in words.
    """
    measured = [row for row in found["rows"] if "phases" in row]
    rows = [row for row in measured if row["ms"] <= WIDEST * measured[0]["ms"]]
    longer = ", ".join(f"{row['variant']} {row['ms']:.1f}" for row in measured if row not in rows)
    bars = [Bar(row["variant"], row["phases"], f"{row['ms']:.1f} ms   {row['x_bf16']:.2f}x") for row in rows]
    colours = {name: colour for name, colour in PHASE_COLOURS.items() if any(row["phases"].get(name) for row in rows)}
    shown = [bar._replace(parts={name: bar.parts[name] for name in colours}) for bar in bars]
    title = f"A training step by phase, {found['settings']['size']} ({found['hardware']}, {found['date']})"
    return svg(title, "ms of one profiled step" + (f" (not drawn: {longer})" if longer else ""), shown, colours)


def overheads(founds: Sequence[Mapping[str, Any]]) -> str:
    """What watching every tensor adds to a step, a bar per size, recipe and cadence."""
    cadences = {"every step": ("every_1_overhead_pct", None), "every 10 steps": ("every_10_overhead_pct", BAND)}
    bars, colours = [], {}
    for found in founds:
        for row in found["rows"]:
            for cadence, (column, colour) in cadences.items():
                name = row["recipe"] if colour is None else "watched every 10 steps"
                colours[name] = colour or variant_colors([name])[name]
                value = row[column]
                label = f"{found['settings']['size']} {row['recipe']}" if colour is None else ""
                bars.append(Bar(label, {name: max(0.0, value)}, f"{value:.2f} % {cadence}"))
    dates = sorted({found["date"] for found in founds})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    title = f"What watching adds to a step ({founds[0]['hardware']}, {when})"
    return svg(title, "% of the unwatched step", bars, colours)
