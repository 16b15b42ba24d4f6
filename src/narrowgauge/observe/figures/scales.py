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
from bokeh.models import BasicTicker, ColumnDataSource, CustomJS, CustomJSTickFormatter, Range1d
from numpy.typing import NDArray

from narrowgauge.observe.figures.frame import FONT, frame, hover, plain, shorten, spread
from narrowgauge.observe.figures.heatmap import trim_common
from narrowgauge.observe.figures.palette import INK
from narrowgauge.observe.figures.sampling import Floats

Scales = NDArray[np.float32]


def scale_traces(scales: Mapping[str, Scales], steps: Floats, layers: Sequence[str], *, colors: Mapping[str, str],
                 named: Mapping[str, Sequence[str]], shown: str, x_range: Range1d | None = None,
                 y_range: Range1d | None = None, y_label: str = "", height: int = 250) -> Any:
    """Scale over steps for one role.

    `scales`: [L, T] by variant, NaN where nothing was recorded; `named`: by variant, the modules drawn on their own;
    `colors`: by variant; `shown`: the variant drawn first. The figure's tags hold a `CustomJS` "swap:scales" that
    takes {key: variant}.
    """
    p = frame(height=height, x_label="step", y_label=y_label, x_range=x_range or _x_range(steps),
              y_range=y_range or scale_range(scales.values()))
    p.yaxis.ticker = BasicTicker(min_interval=1, max_interval=None, desired_num_ticks=6, mantissas=[1, 2, 4, 5])
    p.yaxis.formatter = CustomJSTickFormatter(code=_POWER)
    bands = {key: _bands(grid, steps) for key, grid in scales.items()}
    lines = {key: _lines(scales[key], steps, layers, named.get(key, ())) for key in scales}
    band = ColumnDataSource(bands[shown])
    line = ColumnDataSource(lines[shown])
    color = colors[shown]
    outer = p.varea("step", "low", "high", source=band, color=color, alpha=0.10)
    inner = p.varea("step", "q25", "q75", source=band, color=color, alpha=0.22)
    median = p.line("step", "median", source=band, color=color, line_width=2)
    p.multi_line("xs", "ys", source=line, color=INK, line_width=1, alpha=0.75)
    labels = p.text("label_x", "label_y", "label", source=line, text_color=INK, text_font=FONT, text_font_size="10.5px",
                    text_baseline="bottom", text_align="right", y_offset=-2)
    p.add_tools(hover([median], [("step", "@step{0,0}"), ("log2 median", "@median{0.00}"), ("lowest", "@low{0.00}"),
                                 ("highest", "@high{0.00}")], mode="vline"))
    glyphs = [outer.glyph, inner.glyph, median.glyph]
    p.tags = [CustomJS(name="swap:scales", code=_SWAP, args={
        "bands": {key: ColumnDataSource(b) for key, b in bands.items()},
        "lines": {key: ColumnDataSource(b) for key, b in lines.items()},
        "band": band, "line": line, "colors": dict(colors), "glyphs": glyphs,
    })]
    labels.level = "annotation"
    return p


_SWAP = """
const pick = (m, k) => m instanceof Map ? m.get(k) : m[k];
const key = cb_obj.key;
if (!pick(bands, key)) return;
band.data = {...Object.fromEntries(pick(bands, key).data instanceof Map ? pick(bands, key).data : Object.entries(pick(bands, key).data))};
line.data = {...Object.fromEntries(pick(lines, key).data instanceof Map ? pick(lines, key).data : Object.entries(pick(lines, key).data))};
for (const glyph of glyphs) {
  if ("fill_color" in glyph.properties) glyph.fill_color = pick(colors, key);
  if ("line_color" in glyph.properties) glyph.line_color = pick(colors, key);
}
"""

_POWER = """
if (tick !== Math.round(tick)) return "";
return "2" + String(tick).replace(/[-0-9]/g, c => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]);
"""


def scale_range(grids: Any) -> Range1d:
    """The log2 range over all grids, with a margin: one for all variants, so that switching keeps the axis."""
    logs = [np.log2(g[np.isfinite(g) & (g > 0)]) for g in grids]
    values = np.concatenate([v for v in logs if v.size] or [np.zeros(1)])
    return Range1d(float(values.min()) - 0.6, float(values.max()) + 0.9)


def _x_range(steps: Floats) -> Range1d:
    first, last = (float(steps[0]), float(steps[-1])) if len(steps) else (0.0, 1.0)
    return Range1d(first - 0.5, max(last, first + 1) + 0.5)


def _bands(grid: Scales, steps: Floats) -> dict[str, Any]:
    logs = np.log2(np.where(grid > 0, grid, np.nan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step without any record gives NaN, as it should
        low, q25, median, q75, high = np.nanpercentile(logs, [0, 25, 50, 75, 100], axis=0)
    return {"step": steps, "low": low, "q25": q25, "median": median, "q75": q75, "high": high}


def _lines(grid: Scales, steps: Floats, layers: Sequence[str], modules: Sequence[str]) -> dict[str, Any]:
    short = dict(zip(layers, trim_common(layers), strict=True))
    rows = [(m, list(layers).index(m)) for m in dict.fromkeys(modules) if m in short]
    logs = np.log2(np.where(grid > 0, grid, np.nan))
    xs = [steps for _ in rows]
    ys = [logs[row] for _, row in rows]
    finite = [np.flatnonzero(np.isfinite(y)) for y in ys]
    label_x = [float(steps[f[-1]]) if len(f) else np.nan for f in finite]
    ends = [float(y[f[-1]]) if len(f) else np.nan for y, f in zip(ys, finite, strict=True)]
    label_y = spread(ends, 0.9) if ends and np.isfinite(ends).all() else ends
    return {"xs": xs, "ys": ys, "label_x": label_x, "label_y": label_y,
            "label": [plain(shorten(short[m], 24)) for m, _ in rows]}
