"""How scales moved: per role, the spread over all layers and the traces of the tensors that lose most.

    outer band   smallest .. largest scale of any layer       inner band   25th .. 75th percentile
    line         the median layer                             thin lines   the worst tensors, each by name

x ≈ codes · scale, so a scale that halves means that the tensor's amax halved. The axis is log2: a straight slope is
exponential drift, a staircase is a delayed scale, a flat line under a moving amax is a stuck one.

Legend: L = layers, T = recorded steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import BasicTicker, ColumnDataSource, CustomJS, CustomJSTickFormatter, Range1d
from numpy.typing import NDArray

from narrowgauge.observe.figures.frame import FONT, POWER_TICKS, distinct, frame, hover, plain, spread
from narrowgauge.observe.figures.heatmap import trim_common
from narrowgauge.observe.figures.palette import INK
from narrowgauge.observe.figures.sampling import Floats

Scales = NDArray[np.float32]


def scale_traces(
    scales: Mapping[str, Scales],
    steps: Floats,
    layers: Sequence[str],
    *,
    colors: Mapping[str, str],
    named: Mapping[str, Sequence[str]],
    shown: str,
    x_range: Range1d | None = None,
    y_label: str = "",
    height: int = 250,
) -> Any:
    """Scale over steps for one role.

    `scales`: [L, T] by variant, NaN where nothing was recorded; `named`: by variant, the modules drawn on their own;
    `colors`: by variant; `shown`: the variant drawn first. The figure's tags hold a `CustomJS` "swap:scales" that
    takes {key: variant}.
    """
    ranges = {key: scale_range([grid]) for key, grid in scales.items()}
    y_range = Range1d(*ranges[shown])
    p = frame(height=height, x_label="step", y_label=y_label, x_range=x_range or scale_steps(steps), y_range=y_range)
    p.yaxis.ticker = BasicTicker(min_interval=1, max_interval=None, desired_num_ticks=6, mantissas=[1, 2, 4, 5])
    p.xaxis.ticker.desired_num_ticks = 3  # three of these stand in a row: more would lie over each other
    if len(steps):
        p.xaxis.bounds = (float(steps[0]) - 1, float(steps[-1]) + 1)  # no ticks under the names
    p.yaxis.formatter = CustomJSTickFormatter(code=POWER_TICKS)
    bands = {key: _bands(grid, steps) for key, grid in scales.items()}
    lines = {key: _lines(scales[key], steps, layers, named.get(key, ()), ranges[key]) for key in scales}
    band = ColumnDataSource(bands[shown])
    line = ColumnDataSource(lines[shown])
    color = colors[shown]
    outer = p.varea("step", "low", "high", source=band, color=color, alpha=0.10)
    inner = p.varea("step", "q25", "q75", source=band, color=color, alpha=0.22)
    median = p.line("step", "median", source=band, color=color, line_width=2)
    p.multi_line("xs", "ys", source=line, color=INK, line_width=1, alpha=0.7)
    p.scatter("label_x", "end_y", source=line, color=INK, size=3)  # all that is seen of a layer recorded once
    p.text(
        "label_x",
        "label_y",
        "label",
        source=line,
        text_color=INK,
        text_font=value(FONT),
        text_font_size="11px",
        text_baseline="middle",
        text_align="left",
        x_offset=5,
        level="annotation",
    )
    p.add_tools(
        hover(
            [median],
            [
                ("step", "@step{0,0}"),
                ("log2 median", "@median{0.00}"),
                ("lowest", "@low{0.00}"),
                ("highest", "@high{0.00}"),
            ],
            mode="vline",
        )
    )
    glyphs = [outer.glyph, inner.glyph, median.glyph]
    p.tags = [
        CustomJS(
            name="swap:scales",
            code=_SWAP,
            args={
                "bands": {key: ColumnDataSource(b) for key, b in bands.items()},
                "lines": {key: ColumnDataSource(b) for key, b in lines.items()},
                "band": band,
                "line": line,
                "colors": dict(colors),
                "glyphs": glyphs,
                "ranges": {key: list(r) for key, r in ranges.items()},
                "y_range": p.y_range,
            },
        )
    ]
    return p


_SWAP = """
// Dictionaries arrive as Map or as plain object, whichever BokehJS made of them.
const pick = (m, k) => m instanceof Map ? m.get(k) : m[k];
const copy = data => data instanceof Map ? Object.fromEntries(data) : {...data};
const key = cb_obj.key;
if (!pick(bands, key)) return;
[y_range.start, y_range.end] = pick(ranges, key);
band.data = copy(pick(bands, key).data);
line.data = copy(pick(lines, key).data);
for (const glyph of glyphs) {
  if ("fill_color" in glyph.properties) glyph.fill_color = pick(colors, key);
  if ("line_color" in glyph.properties) glyph.line_color = pick(colors, key);
}
"""


def scale_range(grids: Any) -> tuple[float, float]:
    """The log2 range over some grids, with a margin; at least two binades, so that a flat scale looks flat."""
    logs = [np.log2(g[np.isfinite(g) & (g > 0)]) for g in grids]
    values = np.concatenate([v for v in logs if v.size] or [np.zeros(1)])
    low, high = float(values.min()) - 0.4, float(values.max()) + 0.4
    lack = max(2.4 - (high - low), 0.0) / 2
    return low - lack, high + lack


def scale_steps(steps: Floats) -> Range1d:
    """The x range of scale traces, one for all roles: what was recorded, and room for names on the right."""
    first, last = (float(steps[0]), float(steps[-1])) if len(steps) else (0.0, 1.0)
    return Range1d(first - 0.01 * max(last - first, 1), last + 0.38 * max(last - first, 1))


def _bands(grid: Scales, steps: Floats) -> dict[str, Any]:
    logs = np.log2(np.where(grid > 0, grid, np.nan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step without any record gives NaN, as it should
        low, q25, median, q75, high = np.nanpercentile(logs, [0, 25, 50, 75, 100], axis=0)
    return {"step": steps, "low": low, "q25": q25, "median": median, "q75": q75, "high": high}


def _lines(
    grid: Scales, steps: Floats, layers: Sequence[str], modules: Sequence[str], y_range: tuple[float, float]
) -> dict[str, Any]:
    short = dict(zip(layers, trim_common(layers), strict=True))
    rows = [(m, list(layers).index(m)) for m in dict.fromkeys(modules) if m in short]
    logs = np.log2(np.where(grid > 0, grid, np.nan))
    known = [np.isfinite(logs[row]) for _, row in rows]  # joined, however far apart: a lone point has no line
    xs = [steps[k] for k in known]
    ys = [logs[row][k] for (_, row), k in zip(rows, known, strict=True)]
    label_x = [float(x[-1]) if len(x) else np.nan for x in xs]
    ends = [float(y[-1]) if len(y) else np.nan for y in ys]
    gap = 0.08 * (y_range[1] - y_range[0])
    label_y = spread(ends, gap, y_range[0] + gap / 2, y_range[1] - gap / 2) if np.isfinite(ends).all() else ends
    return {
        "xs": xs,
        "ys": ys,
        "label_x": label_x,
        "end_y": ends,
        "label_y": label_y,
        "label": [plain(name) for name in distinct([short[m] for m, _ in rows], 16)],
    }
