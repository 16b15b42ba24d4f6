"""The same-weights measure by layer: how far each parameter's FP8 gradient is from the baseline's.

    relative error = |g_fp8 - g_baseline| / |g_baseline|         per parameter, same weights, batch and random state

One row per parameter, worst on top, one dot per variant; the axis is logarithmic. Healthy FP8 sits near 0.03 .. 0.1
(28.5 .. 24.6 dB per gemm, and errors of deeper gemms add up on the way back).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange, FixedTicker

from narrowgauge.observe.figures.frame import distinct, frame, hover, plain
from narrowgauge.observe.figures.heatmap import trim_common
from narrowgauge.observe.figures.palette import GRID

LayerErrors = Sequence[tuple[str, float, float]]  # (parameter, cosine, relative error)


def gradient_errors(layers: Mapping[str, LayerErrors], colors: Mapping[str, str], *, most: int = 14) -> Any:
    """Relative gradient error of the `most` worst parameters, a dot per variant.

    `layers`: by variant, (parameter, cosine, relative error) of each parameter; `colors` by variant.
    """
    worst: dict[str, float] = {}
    for rows in layers.values():
        for name, _, error in rows:
            if np.isfinite(error):
                worst[name] = max(worst.get(name, 0.0), error)
    names = sorted(worst, key=lambda n: worst[n], reverse=True)[:most]
    short = _unique([plain(n) for n in distinct(trim_common(names), 34)])
    label = dict(zip(names, short, strict=True))
    values = [max(worst[n], 1e-9) for n in names] or [1.0]
    smallest = [e for rows in layers.values() for n, _, e in rows if n in label and e > 0] or [1e-3]
    p = frame(
        height=70 + 21 * max(len(names), 1),
        x_label="relative gradient error, |g − g₀| / |g₀|",
        zoom="",
        y_range=FactorRange(*reversed(short)),
        x_axis_type="log",
        x_range=(max(min(smallest) / 1.6, 1e-9), max(values) * 1.6),
    )
    p.ygrid.grid_line_color = GRID
    wide = max(values) / max(min(smallest), 1e-9) > 12
    marks = [m * 10.0**k for k in range(-9, 4) for m in ((1, 2, 5) if wide else (1, 1.5, 2, 3, 4, 5, 7))]
    p.xaxis.ticker = FixedTicker(ticks=marks)
    p.xaxis.major_label_overrides = {m: f"{m:g}" for m in marks}
    p.yaxis.major_label_text_font_size = "11.5px"
    dots = []
    for variant, rows in layers.items():
        mine = [(label[n], n, c, e) for n, c, e in rows if n in label and np.isfinite(e)]
        source = ColumnDataSource(
            {
                "y": [r[0] for r in mine],
                "name": [r[1] for r in mine],
                "cosine": [r[2] for r in mine],
                "error": [max(r[3], 1e-9) for r in mine],
                "variant": [plain(variant)] * len(mine),
            }
        )
        dots.append(p.scatter("error", "y", source=source, color=colors[variant], size=9, alpha=0.85))
    p.add_tools(
        hover(
            dots,
            [("", "@variant"), ("", "@name"), ("relative error", "@error{0.0000}"), ("cosine", "@cosine{0.000000}")],
        )
    )
    return p


def _unique(names: Sequence[str]) -> list[str]:
    """Two parameters whose cut names collide get a zero-width mark each, or they would share a row."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name + "\u200b" * (seen[name] - 1))
    return result
