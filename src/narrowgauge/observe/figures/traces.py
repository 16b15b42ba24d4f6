"""One run's numbers over steps, and what pictures of several runs share: their range, their names at the ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import CustomJS, Label, Range1d

from narrowgauge.observe.figures.frame import FONT, plain, shorten, spread, step_range
from narrowgauge.observe.figures.palette import MUTED, NOISE
from narrowgauge.observe.figures.sampling import Floats, keep_extrema

LABEL_ROOM = 0.11  # of the x range, right of the last step, at least
ENDED = " (ended)"
ROOM_PER_LETTER = 0.009  # of a label, in a wide page; they are bold
PIXELS_PER_LETTER, OFFSET = 7.5, 7  # of a label, wherever it stands
# On a narrow page a share of the range is less than the names need, and numbers of steps lie over each other; where it
# is zoomed, nothing is moved.
ROOM = """
const width = cb_obj.inner_width, pixels = Math.max(...range.tags), span = right - range.start;
ticker.desired_num_ticks = Math.max(2, Math.min(6, Math.floor(width / 100)));
if (range.end < right || width < 2 * pixels) return;
range.end = range.reset_end = Math.max(end, right + span * pixels / (width - pixels));
"""
LEFT = 66  # pixels left of the axis, the same in all pictures over training steps


@dataclass(frozen=True)
class Trace:
    """One run's values over steps: steps [n] ascending, values [n], NaN where the value was not finite."""

    name: str
    color: str
    steps: Floats
    values: Floats


def shared_steps(traces: Sequence[Trace]) -> Range1d:
    """The x range that holds all traces and their direct labels."""
    first, last = ends(traces)
    letters = (len(_said(t.name)) + len(ENDED if len(t.steps) and t.steps[-1] < last else "") for t in traces)
    return step_range(first, last, max(LABEL_ROOM, ROOM_PER_LETTER * max(letters, default=0)))


def ends(traces: Sequence[Trace]) -> tuple[float, float]:
    """First and last step of any of the traces."""
    known = [t.steps for t in traces if len(t.steps)]
    return min((float(s[0]) for s in known), default=0.0), max((float(s[-1]) for s in known), default=1.0)


def thin(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Few enough points to draw, extrema among them; what is not finite becomes a gap."""
    return keep_extrema(steps, np.where(np.isfinite(values), values, np.nan))


def direct_labels(p: Any, traces: Sequence[Trace], curves: Sequence[Floats], y_range: Range1d, height: int) -> None:
    """Each run's name at the end of its line, pushed apart so that none covers another."""
    found = []
    for trace, curve in zip(traces, curves, strict=True):
        finite = np.flatnonzero(np.isfinite(curve))
        if len(finite):
            y = float(np.clip(curve[finite[-1]], y_range.start, y_range.end))
            found.append((trace, float(trace.steps[finite[-1]]), y))
    per_pixel = (y_range.end - y_range.start) / max(height - 60, 1)
    heights = spread(
        [y for _, _, y in found], 15 * per_pixel, y_range.start + 8 * per_pixel, y_range.end - 8 * per_pixel
    )
    right, letters = max((x for _, x, _ in found), default=0.0), 0
    for (trace, x, _), y in zip(found, heights, strict=True):
        # A trace of every second step need not be in the last one.
        spacing = float(np.diff(trace.steps).max(initial=0.0))
        stopped = "" if x >= right or x + spacing > right else " (NaN)" if trace.steps[-1] > x else ENDED
        letters = max(letters, len(_said(trace.name) + stopped))
        p.add_layout(
            Label(
                x=max(x, right),
                y=y,
                x_offset=OFFSET,
                text=_said(trace.name) + stopped,
                text_color=MUTED if trace.color == NOISE else trace.color,
                text_font=FONT,
                text_font_size="12px",
                text_baseline="middle",
                text_font_style="bold",
            )
        )
    p.x_range.tags = [*p.x_range.tags, OFFSET + PIXELS_PER_LETTER * letters]  # of all pictures that share it
    known = {"range": p.x_range, "right": right, "end": p.x_range.end, "ticker": p.xaxis.ticker}
    p.js_on_change("inner_width", CustomJS(args=known, code=ROOM))


def _said(name: str) -> str:
    return "noise twin" if name == "noise" else plain(shorten(name, 18))
