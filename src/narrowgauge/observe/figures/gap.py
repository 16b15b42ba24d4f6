"""The paired loss gap to the baseline over steps: is it there, and is it more than chance?

    gap_t = 100 * mean_w(loss_variant - loss_baseline) / mean_w |loss_baseline|          %, see sampling.paired_gap_pct

What lies inside the noise twin's band is not evidence. The thick level over the judged steps is the verdict's own
number (observe.verdict.gap); the curve shows how it came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import BoxAnnotation, ColumnDataSource, CustomJSTickFormatter, Label, Range1d

from narrowgauge.observe.figures.frame import FONT, frame, hover, plain
from narrowgauge.observe.figures.palette import BAND, FAIL, INK, MUTED, PAPER, PASS
from narrowgauge.observe.figures.sampling import paired_gap_pct, smoothing_window
from narrowgauge.observe.figures.traces import LEFT, Trace, direct_labels, ends, shared_steps, thin
from narrowgauge.observe.verdict.gap import PASS_PCT, WATCH_PCT

WORDS, BESIDE = 16, 90  # pixels: a row of words is high, and the threshold's own are wide


def loss_gap(
    baseline: Trace,
    others: Sequence[Trace],
    x_range: Range1d | None = None,
    *,
    noise: Trace | None = None,
    band_pct: float | None = None,
    means: Mapping[str, tuple[tuple[int, int], float]] | None = None,
    height: int = 280,
) -> Any:
    """Paired loss gap of each run to the baseline, %, over the noise band and the two thresholds.

    `band_pct`: half the height of the band that the noise twin spans; `means`: by run, the judged window (first and
    last step) and the mean gap over it, drawn as a thick level: that level, not the curve, is what the verdict judged.
    """
    smooth = smoothing_window(len(baseline.values))
    gaps = [_gap_trace(baseline, trace, smooth) for trace in others]
    chance = _gap_trace(baseline, noise, smooth) if noise is not None else None
    means = means or {}
    pixels = max(height - 60, 1)  # of the picture within its axes
    y_range = _gap_range([*gaps, *([chance] if chance else [])], [pct for _, pct in means.values()], pixels)
    p = frame(
        height=height,
        x_label="step",
        y_label="loss gap to baseline, %",
        x_range=x_range or shared_steps([baseline, *others]),
        y_range=y_range,
        left=LEFT,
    )
    p.yaxis.formatter = CustomJSTickFormatter(code=_SIGNED)
    first_step, last_step = p.xaxis.bounds = ends([baseline, *others])
    if first_step == last_step:  # one step: levels need some length to be seen
        first_step -= 1
    if band_pct is not None:
        p.add_layout(
            BoxAnnotation(
                left=first_step,
                right=last_step,
                bottom=-band_pct,
                top=band_pct,
                fill_color=BAND,
                fill_alpha=0.6,
                level="underlay",
            )
        )
    for first, last in sorted({window for window, _ in means.values()}):
        p.add_layout(BoxAnnotation(left=first, right=last, fill_color=MUTED, fill_alpha=0.10, level="underlay"))
        p.add_layout(_note(first, y_range.end, f"judged: steps {first:,}–{last:,}", "top"))
    if chance is not None and len(chance.steps):
        p.line(*thin(chance.steps, chance.values), color=chance.color, line_width=1.3)
    p.segment(x0=[first_step], y0=[0], x1=[last_step], y1=[0], color=INK, line_width=1.6)
    for level, color in ((PASS_PCT, PASS), (WATCH_PCT, FAIL)):
        p.segment(x0=[first_step], y0=[level], x1=[last_step], y1=[level], color=color, line_dash=[5, 4])
    p.add_layout(_note(first_step, WATCH_PCT, "1 %: fail above", "bottom", FAIL))
    apart = (WATCH_PCT - PASS_PCT) / (y_range.end - y_range.start) * pixels >= WORDS
    at, right = (PASS_PCT, 0) if apart else (WATCH_PCT, BESIDE)
    p.add_layout(_note(first_step, at, "0.25 %: pass below", "bottom", PASS, right))
    lines = []
    for gap in gaps:
        xs, ys = thin(gap.steps, gap.values)
        source = ColumnDataSource({"step": xs, "value": ys, "name": [plain(gap.name)] * len(xs)})
        lines.append(p.line("step", "value", source=source, color=gap.color, line_width=1.6, alpha=0.8))
        if len(xs) == 1:
            p.scatter("step", "value", source=source, color=gap.color, size=7)
        if gap.name in means:
            (first, last), pct = means[gap.name]
            p.segment(x0=[first], y0=[pct], x1=[last], y1=[pct], color=gap.color, line_width=5, line_cap="round")
    p.add_tools(hover(lines, [("", "@name"), ("step", "@step{0,0}"), ("mean gap", "@value{+0.000} %")], mode="mouse"))
    labelled = [*gaps, *([chance] if chance is not None else [])]
    levels = [
        np.where(np.isfinite(g.values), means[g.name][1] if g.name in means else g.values, np.nan) for g in labelled
    ]
    direct_labels(p, labelled, levels, y_range, height)
    return p


_SIGNED = """
if (tick === 0) return "0";
return (tick < 0 ? "−" : "+") + Math.abs(tick).toFixed(Math.abs(tick * 10 - Math.round(tick * 10)) > 1e-6 ? 2 : 1);
"""


def _gap_trace(baseline: Trace, trace: Trace, smooth: int) -> Trace:
    return Trace(
        trace.name, trace.color, *paired_gap_pct(baseline.steps, baseline.values, trace.steps, trace.values, smooth)
    )


def _note(x: float, y: float, text: str, baseline: str, color: str = MUTED, right: int = 0) -> Label:
    return Label(
        x=x,
        y=y,
        text=text,
        text_color=color,
        text_font=FONT,
        text_font_size="11px",
        background_fill_color=PAPER,  # a curve that runs through them leaves words readable
        background_fill_alpha=0.6,
        x_offset=2 + right,
        y_offset=2 if baseline == "bottom" else -2,
        text_baseline=baseline,
    )


def _gap_range(gaps: Sequence[Trace], means: Sequence[float], pixels: int) -> Range1d:
    """Holds both thresholds and most of every gap after the first tenth, where losses still fall steeply.

    Of its `pixels` two rows of words are above the higher threshold: its own, and which steps were judged.
    """
    low, high = min([-0.6, *(1.2 * m for m in means)]), max([1.2, *(1.2 * m for m in means)])
    for gap in gaps:
        late = gap.values[len(gap.values) // 10 :]
        late = late[np.isfinite(late)]
        if len(late):
            most = 0.01 if len(late) >= 200 else 0.0  # in a long run a spike may leave the picture
            low = min(low, float(np.quantile(late, most)) * 1.1)
            high = max(high, float(np.quantile(late, 1 - most)) * 1.1)
    low, high = max(low, -20.0), min(high, 60.0)
    words = min(2 * WORDS / pixels, 0.5)
    return Range1d(low, max(high, (WATCH_PCT - words * low) / (1 - words)))
