"""Loss over steps: raw losses light, their running mean (`sampling.running_mean`) on top.

The eye gets the trend, and the noise that it was taken from stays visible. A spike that would flatten the picture
leaves it, and a triangle on the upper edge says where, and how high it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, Range1d

from narrowgauge.observe.figures.frame import frame, hover, plain
from narrowgauge.observe.figures.sampling import Floats, running_mean, smoothing_window
from narrowgauge.observe.figures.traces import LEFT, Trace, direct_labels, ends, shared_steps, thin

MARKS = 200  # of a kind, of one run; more would be a bar


def loss_curves(
    traces: Sequence[Trace], x_range: Range1d | None = None, *, y_label: str = "training loss", height: int = 310
) -> Any:
    """Loss of every run over steps: raw light, running mean on top, names at the line ends.

    A step whose loss was not finite is a gap in the line and a cross on the lower edge, one whose loss lies above the
    picture, where the mean does not, a triangle on the upper.
    """
    smoothed = [running_mean(t.values, smoothing_window(len(t.values))) for t in traces]
    y_range = _loss_range([t.values for t in traces], smoothed)
    p = frame(
        height=height,
        x_label="step",
        y_label=y_label,
        x_range=x_range or shared_steps(traces),
        y_range=y_range,
        left=LEFT,
    )
    first, last = ends(traces)
    if first < last:
        p.xaxis.bounds = first, last  # right of it are names, and no ticks
    lines, spikes = [], []
    edge = y_range.end - 7 * (y_range.end - y_range.start) / height
    # The baseline is drawn last but for its labels: variants would hide it otherwise, and it is the reference.
    for trace, mean in _back_to_front(traces, smoothed):
        p.line(*thin(trace.steps, trace.values), color=trace.color, alpha=0.22, line_width=1)
        xs, ys = thin(trace.steps, mean)
        source = ColumnDataSource({"step": xs, "value": ys, "name": [plain(trace.name)] * len(xs)})
        width = 2.2 if trace.name == "baseline" else 1.8
        lines.append(p.line("step", "value", source=source, color=trace.color, line_width=width))
        if len(xs) == 1:
            p.scatter("step", "value", source=source, color=trace.color, size=7)
        bad = trace.steps[~np.isfinite(trace.values)]
        if len(bad):
            xs = bad[np.unique(np.linspace(0, len(bad) - 1, min(len(bad), MARKS)).astype(int))]
            p.scatter(xs, np.full(len(xs), y_range.start), marker="x", size=8, line_width=2, color=trace.color)
        high = _spikes(trace.values, mean, y_range.end)
        if len(high):
            found = {"step": trace.steps[high], "value": trace.values[high], "edge": np.full(len(high), edge)}
            source = ColumnDataSource(found | {"name": [plain(trace.name)] * len(high)})
            spikes.append(p.scatter("step", "edge", source=source, marker="triangle", size=8, color=trace.color))
    p.add_tools(hover(lines, [("", "@name"), ("step", "@step{0,0}"), ("mean loss", "@value{0.0000}")], mode="mouse"))
    if spikes:
        p.add_tools(hover(spikes, [("", "@name"), ("step", "@step{0,0}"), ("loss, beyond", "@value{0.0000}")]))
    direct_labels(p, traces, smoothed, y_range, height)
    return p


def _back_to_front(traces: Sequence[Trace], smoothed: Sequence[Floats]) -> list[tuple[Trace, Floats]]:
    rank = {"noise": 0, "baseline": 2}
    return sorted(zip(traces, smoothed, strict=True), key=lambda pair: rank.get(pair[0].name, 1))


def _spikes(raw: Floats, mean: Floats, top: float) -> Any:
    """Of each stretch of losses above the picture, while the mean is inside, the place of the highest, int [n]."""
    above = np.flatnonzero(np.isfinite(raw) & (raw > top) & (mean <= top))
    stretches = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
    highest = np.array([stretch[np.argmax(raw[stretch])] for stretch in stretches if len(stretch)], dtype=int)
    return np.sort(highest[np.argsort(raw[highest])[-MARKS:]])


def _loss_range(raw: Sequence[Floats], smoothed: Sequence[Floats]) -> Range1d:
    """From the lowest raw loss to the highest smoothed one: one raw spike must not flatten the picture."""
    low = min((np.nanmin(v[np.isfinite(v)]) for v in raw if np.isfinite(v).any()), default=0.0)
    # A run that diverged to 1e6 would hide the others: four times the typical start is where the picture ends.
    tops = [float(np.max(v[np.isfinite(v)])) for v in smoothed if np.isfinite(v).any()]
    high = max(tops, default=1.0)
    if tops:
        high = min(high, low + 4 * max(float(np.median(tops)) - low, 1e-12))
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Range1d(float(low - pad), float(high + pad))
