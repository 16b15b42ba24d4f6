"""Loss over steps, and the paired gap to the baseline under it, on one x range.

Raw losses are drawn light and their running mean (`sampling.running_mean`) on top: the eye gets the trend, and the
noise it was taken from stays visible. The gap picture shows the noise twin's own gap as a band: what lies inside it
is not evidence.

    gap_t = 100 * mean_w(loss_variant - loss_baseline) / mean_w(loss_baseline)          %, see paired_gap_pct

The thick level over the judged steps is the verdict's own number (observe.verdict.gap), the curve shows how it came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import BoxAnnotation, ColumnDataSource, CustomJSTickFormatter, Label, Range1d, Span

from narrowgauge.observe.figures.frame import FONT, frame, hover, plain, shorten, spread, step_range
from narrowgauge.observe.figures.palette import BAND, FAIL, INK, MUTED, PASS
from narrowgauge.observe.figures.sampling import (
    Floats,
    keep_extrema,
    paired_gap_pct,
    running_mean,
    smoothing_window,
)
from narrowgauge.observe.verdict.gap import PASS_PCT, WATCH_PCT

_LABEL_ROOM = 0.11


@dataclass(frozen=True)
class Trace:
    """One run's values over steps: steps [n] ascending, values [n], NaN where the value was not finite."""

    name: str
    color: str
    steps: Floats
    values: Floats


def shared_steps(traces: Sequence[Trace]) -> Range1d:
    """The x range that holds all traces and their direct labels."""
    ends = [(t.steps[0], t.steps[-1]) for t in traces if len(t.steps)]
    if not ends:
        return step_range(0, 1)
    return step_range(min(a for a, _ in ends), max(b for _, b in ends), _LABEL_ROOM)


def loss_curves(traces: Sequence[Trace], x_range: Range1d | None = None, *, y_label: str = "training loss",
                height: int = 340) -> Any:
    """Loss of every run over steps: raw light, running mean on top, names at the line ends.

    A step whose loss was not finite is a gap in the line and a cross on the lower edge.
    """
    smoothed = [running_mean(t.values, smoothing_window(len(t.values))) for t in traces]
    y_range = _loss_range([t.values for t in traces], smoothed)
    p = frame(height=height, x_label="step", y_label=y_label, x_range=x_range or shared_steps(traces), y_range=y_range)
    lines = []
    # The baseline is drawn last but for its labels: variants would hide it otherwise, and it is the reference.
    for trace, mean in _back_to_front(traces, smoothed):
        p.line(*_thin(trace.steps, trace.values), color=trace.color, alpha=0.22, line_width=1)
        xs, ys = _thin(trace.steps, mean)
        source = ColumnDataSource({"step": xs, "value": ys, "name": [plain(trace.name)] * len(xs)})
        width = 2.2 if trace.name == "baseline" else 1.8
        lines.append(p.line("step", "value", source=source, color=trace.color, line_width=width))
        if len(xs) == 1:
            p.scatter("step", "value", source=source, color=trace.color, size=7)
        bad = trace.steps[~np.isfinite(trace.values)]
        if len(bad):
            xs = bad[np.unique(np.linspace(0, len(bad) - 1, min(len(bad), 200)).astype(int))]
            p.scatter(xs, np.full(len(xs), y_range.start), marker="x", size=8, line_width=2, color=trace.color)
    p.add_tools(hover(lines, [("", "@name"), ("step", "@step{0,0}"), ("mean loss", "@value{0.0000}")], mode="mouse"))
    _direct_labels(p, traces, smoothed, y_range, height)
    return p


def loss_gap(baseline: Trace, others: Sequence[Trace], x_range: Range1d | None = None, *, noise: Trace | None = None,
             band_pct: float | None = None, means: Mapping[str, tuple[tuple[int, int], float]] | None = None,
             height: int = 280) -> Any:
    """Paired loss gap of each run to the baseline, %, over the noise band and the two thresholds.

    `band_pct`: half the height of the band that the noise twin spans; `means`: by run, the judged window (first and
    last step) and the mean gap over it, drawn as a thick level: that level, not the curve, is what the verdict judged.
    """
    smooth = smoothing_window(len(baseline.values))
    gaps = [_gap_trace(baseline, trace, smooth) for trace in others]
    chance = _gap_trace(baseline, noise, smooth) if noise is not None else None
    means = means or {}
    y_range = _gap_range([*gaps, *([chance] if chance else [])], [pct for _, pct in means.values()])
    p = frame(height=height, x_label="step", y_label="loss gap to baseline, %",
              x_range=x_range or shared_steps([baseline, *others]), y_range=y_range)
    p.yaxis.formatter = CustomJSTickFormatter(code=_SIGNED)
    if band_pct is not None:
        p.add_layout(BoxAnnotation(bottom=-band_pct, top=band_pct, fill_color=BAND, fill_alpha=0.6, level="underlay"))
    for first, last in sorted({window for window, _ in means.values()}):
        p.add_layout(BoxAnnotation(left=first, right=last, fill_color=MUTED, fill_alpha=0.10, level="underlay"))
        p.add_layout(_note(first, y_range.end, f"judged: steps {first:,}–{last:,}", "top"))
    if chance is not None and len(chance.steps):
        p.line(*_thin(chance.steps, chance.values), color=chance.color, line_width=1.3)
    p.add_layout(Span(location=0, dimension="width", line_color=INK, line_width=1.6))
    start = float(x_range.start if x_range else baseline.steps[0])
    for level, color, word in ((PASS_PCT, PASS, "0.25 %: pass below"), (WATCH_PCT, FAIL, "1 %: fail above")):
        if y_range.start < level < y_range.end:
            p.add_layout(Span(location=level, dimension="width", line_color=color, line_width=1, line_dash=[5, 4]))
            p.add_layout(_note(start, level, word, "bottom", color))
    lines = []
    for gap in gaps:
        xs, ys = _thin(gap.steps, gap.values)
        source = ColumnDataSource({"step": xs, "value": ys, "name": [plain(gap.name)] * len(xs)})
        lines.append(p.line("step", "value", source=source, color=gap.color, line_width=1.6, alpha=0.8))
        if len(xs) == 1:
            p.scatter("step", "value", source=source, color=gap.color, size=7)
        if gap.name in means:
            (first, last), pct = means[gap.name]
            p.segment(x0=[first], y0=[pct], x1=[last], y1=[pct], color=gap.color, line_width=5, line_cap="round")
    p.add_tools(hover(lines, [("", "@name"), ("step", "@step{0,0}"), ("mean gap", "@value{+0.000} %")], mode="mouse"))
    labelled = [*gaps, *([chance] if chance is not None else [])]
    ends = [np.where(np.isfinite(g.values), means[g.name][1] if g.name in means else g.values, np.nan) for g in labelled]
    _direct_labels(p, labelled, ends, y_range, height)
    return p


_SIGNED = """
if (tick === 0) return "0";
return (tick < 0 ? "−" : "+") + Math.abs(tick).toFixed(Math.abs(tick * 10 - Math.round(tick * 10)) > 1e-6 ? 2 : 1);
"""


def _gap_trace(baseline: Trace, trace: Trace, smooth: int) -> Trace:
    return Trace(trace.name, trace.color, *paired_gap_pct(baseline.steps, baseline.values, trace.steps, trace.values, smooth))


def _thin(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    return keep_extrema(steps, np.where(np.isfinite(values), values, np.nan))


def _note(x: float, y: float, text: str, baseline: str, color: str = MUTED) -> Label:
    return Label(x=x, y=y, text=text, text_color=color, text_font=FONT, text_font_size="11px", x_offset=2,
                 y_offset=2 if baseline == "bottom" else -2, text_baseline=baseline)


def _back_to_front(traces: Sequence[Trace], smoothed: Sequence[Floats]) -> list[tuple[Trace, Floats]]:
    rank = {"noise": 0, "baseline": 2}
    return sorted(zip(traces, smoothed, strict=True), key=lambda pair: rank.get(pair[0].name, 1))


def _direct_labels(p: Any, traces: Sequence[Trace], curves: Sequence[Floats], y_range: Range1d, height: int) -> None:
    """Each run's name at the end of its line, pushed apart so that none covers another."""
    ends = []
    for trace, curve in zip(traces, curves, strict=True):
        finite = np.flatnonzero(np.isfinite(curve))
        if len(finite):
            y = float(np.clip(curve[finite[-1]], y_range.start, y_range.end))
            ends.append((trace, float(trace.steps[finite[-1]]), y))
    per_pixel = (y_range.end - y_range.start) / max(height - 60, 1)
    heights = spread([y for _, _, y in ends], 15 * per_pixel)
    right = max((x for _, x, _ in ends), default=0.0)
    for (trace, x, _), y in zip(ends, heights, strict=True):
        stopped = "" if x >= right else " (ended)"
        p.add_layout(Label(x=max(x, right), y=y, x_offset=7, text=plain(shorten(trace.name, 18)) + stopped,
                           text_color=trace.color, text_font=FONT, text_font_size="12px", text_baseline="middle",
                           text_font_style="bold"))


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


def _gap_range(gaps: Sequence[Trace], means: Sequence[float]) -> Range1d:
    """Holds both thresholds and most of every gap after the first tenth, where losses still fall steeply."""
    low, high = min([-0.6, *(1.2 * m for m in means)]), max([1.2, *(1.2 * m for m in means)])
    for gap in gaps:
        late = gap.values[len(gap.values) // 10 :]
        late = late[np.isfinite(late)]
        if len(late):
            low = min(low, float(np.quantile(late, 0.01)) * 1.1)
            high = max(high, float(np.quantile(late, 0.99)) * 1.1)
    return Range1d(max(low, -20.0), min(high, 60.0))
