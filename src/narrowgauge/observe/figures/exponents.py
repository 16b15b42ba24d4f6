"""Where a tensor's values lie in its format: elements per binade, after the scale, over the format's own range.

    position of |x|:   log2(|x| · inv_scale)         binades, 0 is 1.0 in the format

    saturated     |x| · inv_scale > max              clipped to max
    normal        min_normal .. max                  full precision
    subnormal     min_subnormal .. min_normal        one bit less for every binade down
    flushed       <= flush_below                     rounds to zero

A tensor that sits too far left wants a larger inv_scale; one that is wider than the format wants finer blocks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from bokeh.models import (
    BoxAnnotation,
    ColumnDataSource,
    CustomJSTickFormatter,
    Label,
    NumeralTickFormatter,
    Range1d,
    Span,
)

from narrowgauge.formats import Format
from narrowgauge.observe.figures.frame import FONT, POWER_TICKS, frame, hover
from narrowgauge.observe.figures.palette import FAIL, MUTED, TEXT
from narrowgauge.observe.figures.sampling import Floats

_TYPICAL_WIDTH = 520  # pixels, to tell which words fit into their part of the range


def exponent_histogram(
    counts: Floats,
    exponents: Floats,
    inv_scale: float,
    fmt: Format,
    *,
    color: str,
    clipped: bool = True,
    x_label: str = "",
    height: int = 170,
    x_range: Range1d | None = None,
) -> Any:
    """Share of elements per binade of one tensor, drawn over the format's range.

    `counts` [B] elements whose exponent floor(log2|x|) is `exponents` [B] (of the tensor itself, before scaling);
    `inv_scale` moves them into the format. Elements in bars of the warning colour are lost or clipped; the outermost
    bars hold what lies beyond the picture. Unless any element is `clipped`, the last bar ends where the format does.
    """
    shift = math.log2(inv_scale) if inv_scale > 0 and math.isfinite(inv_scale) else 0.0
    axis = x_range or histogram_range(fmt)
    x0, x1 = axis.start, axis.end
    left, counts, exponents = _fold(exponents + shift, counts, exponents, x0, x1)
    total = float(counts.sum())
    share = 100 * counts / total if total else np.zeros_like(counts)
    flush, normal, high = (math.log2(v) for v in (fmt.flush_below, fmt.min_normal, fmt.max))
    middle = left + 0.5
    if not clipped:  # a binade of x need not be one of the format: half of it may lie beyond, and nothing there
        middle = np.minimum(middle, high)
    fate = np.select(
        [middle < flush, middle < normal, middle <= high], ["flushed to zero", "subnormal", "normal"], "saturated"
    )
    top = float(share.max()) if total else 1.0
    p = frame(
        height=height,
        x_label=x_label,
        y_label="% of elements",
        zoom="",
        x_range=axis,
        y_range=Range1d(0, top * 1.32),
        left=58,
    )
    p.yaxis.formatter = NumeralTickFormatter(format="0.[0]")
    p.yaxis.ticker.desired_num_ticks = 3
    p.xaxis.formatter = CustomJSTickFormatter(code=POWER_TICKS)
    for start, stop, alpha in ((x0, flush, 0.16), (flush, normal, 0.07), (high, x1, 0.16)):
        tint = MUTED if stop == normal else FAIL
        p.add_layout(BoxAnnotation(left=start, right=stop, fill_color=tint, fill_alpha=alpha, level="underlay"))
    for edge in (flush, normal, high):
        p.add_layout(Span(location=edge, dimension="height", line_color=MUTED, line_width=1, level="underlay"))
    for start, stop, word in (
        (x0, flush, "flushed to 0"),
        (flush, normal, "subnormal"),
        (normal, high, f"normal, {fmt.name}"),
        (high, x1, "clipped"),
    ):
        lo, hi = max(start, x0), min(stop, x1)
        if (hi - lo) / (x1 - x0) * _TYPICAL_WIDTH > 6.3 * len(word):
            p.add_layout(
                Label(
                    x=(lo + hi) / 2,
                    y=top * 1.29,
                    text=word,
                    text_align="center",
                    text_baseline="top",
                    text_font=FONT,
                    text_font_size="11px",
                    text_color=TEXT,
                )
            )
    bars = ColumnDataSource(
        {
            "left": left + 0.06,
            "right": left + 0.94 if clipped else np.minimum(left + 0.94, high),
            "share": share,
            "fate": fate,
            "color": [FAIL if f[0] in "fs" and f != "subnormal" else color for f in fate],
            "alpha": [0.55 if f == "subnormal" else 0.9 for f in fate],
            "exponent": exponents,
            "count": counts,
        }
    )
    quads = p.quad(
        left="left",
        right="right",
        top="share",
        bottom=0,
        source=bars,
        fill_color="color",
        fill_alpha="alpha",
        line_color=None,
    )
    p.add_tools(
        hover(
            [quads],
            [("|x| from 2^", "@exponent{0}"), ("share", "@share{0.000} %"), ("elements", "@count{0,0}"), ("", "@fate")],
        )
    )
    return p


def histogram_range(fmt: Format) -> Range1d:
    """The same for every tensor of a format, so that histograms can be compared: 8 binades below it, 4 above."""
    return Range1d(math.log2(fmt.flush_below) - 8, math.floor(math.log2(fmt.max)) + 5)


def _fold(left: Floats, counts: Floats, exponents: Floats, low: float, high: float) -> tuple[Floats, Floats, Floats]:
    """Add bars outside [low, high] to the outermost bars inside, so that none is lost from the picture."""
    inside = (left >= low) & (left + 1 <= high)
    if not inside.any():
        return left, counts, exponents
    first, last = np.flatnonzero(inside)[[0, -1]]
    folded = counts[first : last + 1].copy()
    folded[0] += counts[:first].sum()
    folded[-1] += counts[last + 1 :].sum()
    return left[first : last + 1], folded, exponents[first : last + 1]
