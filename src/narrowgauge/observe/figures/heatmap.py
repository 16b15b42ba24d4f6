"""Layers x steps, one colour per cell: where and when a number went wrong.

    underflow_pct   log scale, 0.01 % .. 100 %           dark is bad      zero takes the lightest colour
    sqnr_db         linear, 0 .. 32 dB                   dark is bad
    gain            linear, 0.9 .. 1.1, white at 1       either end is bad
    scale           log2, the range of the grid          no good or bad: look for jumps and for rows unlike the rest

But for the scale, the colour range of a metric is one for all variants and roles, so that pictures can be compared.
Cells without a record stay empty. All (variant, role) grids travel in one source; a `CustomJS` copies the chosen one
into the picture.

Legend: L = layers (rows, first one on top), T = recorded steps (columns).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    ColorBar,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    CustomJSTickFormatter,
    FixedTicker,
    LinearColorMapper,
    LogColorMapper,
    Range1d,
)
from numpy.typing import NDArray

from narrowgauge.observe.figures.frame import FONT, POWER_TICKS, distinct, frame, hover, plain
from narrowgauge.observe.figures.palette import DIVERGING, GRID, HARM, HARM_LOW, SEQUENCE, TEXT
from narrowgauge.observe.figures.sampling import Floats

Grid = NDArray[np.float32]


@dataclass(frozen=True)
class HeatMetric:
    """How one metric is coloured. `low`, `high` in the metric's unit; None: taken from the data, in log2."""

    column: str
    title: str
    unit: str
    palette: tuple[str, ...]
    low: float | None
    high: float | None
    log: bool = False


METRICS = (
    HeatMetric("underflow_pct", "Underflow", "% of elements flushed to zero", HARM, 0.01, 100.0, log=True),
    HeatMetric("sqnr_db", "SQNR", "dB, signal to quantization noise", HARM_LOW, 0.0, 32.0),
    HeatMetric("gain", "Gain", "⟨x,d⟩ / ⟨x,x⟩, 1 is exact", DIVERGING, 0.9, 1.1),
    HeatMetric("scale_max", "Scale", "x ≈ codes · scale", SEQUENCE, None, None),
)


def heatmap(
    metric: HeatMetric,
    layers: Sequence[str],
    steps: Floats,
    grids: Mapping[str, Grid],
    *,
    shown: str,
    x_range: Range1d | None = None,
    y_range: Range1d | None = None,
    height: int | None = None,
) -> Any:
    """One metric over layers and steps.

    `layers` [L] module names in forward order; `steps` [T], at least one; `grids` [L, T] by key, usually
    "variant|role", NaN where nothing was recorded; `shown`: the key drawn first. The figure's tags hold a `CustomJS`
    named "swap:COLUMN": executed with {key} it shows another grid.
    """
    n_layers = len(layers)
    columns, spacing, left = _columns(steps)
    flat = {key: _even(grid, steps, columns) for key, grid in grids.items()}
    if metric.low is None or metric.high is None:
        flat = {key: _log2(grid) for key, grid in flat.items()}
        extents = {key: _extent(grid) for key, grid in flat.items()}
    else:
        extents = dict.fromkeys(flat, (metric.low, metric.high))
    low, high = extents[shown]
    p = frame(
        height=height or heat_height(n_layers),
        x_label="step",
        x_range=x_range or Range1d(left, left + spacing * len(columns)),
        y_range=y_range or Range1d(0, n_layers),
        zoom="box_zoom",
    )
    p.grid.grid_line_color = None
    mapper_type = LogColorMapper if metric.log else LinearColorMapper
    mapper = mapper_type(palette=list(metric.palette), low=low, high=high, nan_color="rgba(0,0,0,0)")
    source = ColumnDataSource({"image": [flat[shown].copy()]})
    image = p.image("image", source=source, x=left, y=0, dw=spacing * len(columns), dh=n_layers, color_mapper=mapper)
    p.xaxis.ticker.desired_num_ticks = 4  # two stand in a row, one on a narrow screen
    _label_rows(p, layers)
    p.add_layout(_color_bar(metric, mapper, low, high), "right")
    p.add_tools(_cell_hover(image, metric, layers, steps[_before(steps, columns)], left, spacing))
    store = ColumnDataSource({key: grid.ravel() for key, grid in flat.items()})
    swap = CustomJS(
        name=f"swap:{metric.column}",
        code=_SWAP,
        args={
            "store": store,
            "source": source,
            "mapper": mapper,
            "extents": {key: list(e) for key, e in extents.items()},
        },
    )
    p.tags = [swap]
    return p


# The image array is overwritten in place: its shape never changes, only what it holds.
_SWAP = """
const image = source.data.image[0];
const columns = store.data instanceof Map ? Object.fromEntries(store.data) : store.data;
const ranges = extents instanceof Map ? Object.fromEntries(extents) : extents;
const grid = columns[cb_obj.key];
if (grid) {
  image.set(grid);
  [mapper.low, mapper.high] = ranges[cb_obj.key];
} else {
  image.fill(NaN);
}
source.change.emit();
"""


def heat_height(layers: int) -> int:
    """Pixels for a heatmap of that many rows: 13 each, between 150 and 460."""
    return int(np.clip(13 * layers + 60, 150, 460))


def _columns(steps: Floats) -> tuple[Floats, float, float]:
    """Evenly spaced column positions [T'], their spacing and the left edge, in steps."""
    if len(steps) < 2:
        return steps, 1.0, float(steps[0]) - 0.5
    spacing = float(np.median(np.diff(steps)))
    count = round((steps[-1] - steps[0]) / spacing) + 1
    if count > 4 * len(steps):  # recorded in bursts: keep the picture small
        count = 4 * len(steps)
        spacing = float(steps[-1] - steps[0]) / (count - 1)
    return steps[0] + spacing * np.arange(count), spacing, float(steps[0] - spacing / 2)


def _even(grid: Grid, steps: Floats, columns: Floats) -> Grid:
    """[L, T] on the recorded steps -> [L, T'] on even columns, last layer first (an image grows upwards)."""
    return np.ascontiguousarray(grid[::-1, _before(steps, columns)], dtype=np.float32)


def _before(steps: Floats, columns: Floats) -> NDArray[np.intp]:
    """Index of the last recorded step at or before each column, [T']."""
    return np.clip(np.searchsorted(steps, columns + 1e-9, side="right") - 1, 0, len(steps) - 1)


def _log2(grid: Grid) -> Grid:
    return np.log2(np.where(grid > 0, grid, np.nan)).astype(np.float32)


def _extent(grid: Grid) -> tuple[float, float]:
    values = grid[np.isfinite(grid)] if np.isfinite(grid).any() else np.zeros(1)
    low, high = float(np.floor(values.min())), float(np.ceil(values.max()))
    return low, max(high, low + 1)


def _label_rows(p: Any, layers: Sequence[str]) -> None:
    """Names of every k-th layer, as many as are readable; all names are in the tooltips."""
    every = max(math.ceil(len(layers) / 30), 1)
    names = distinct(trim_common(layers), 24)
    at = {len(layers) - 1 - i + 0.5: plain(names[i]) for i in range(0, len(layers), every)}
    p.yaxis.ticker = FixedTicker(ticks=list(at))
    p.yaxis.major_label_overrides = at
    p.yaxis.major_label_text_font_size = "10.5px"
    p.yaxis.axis_label = f"every {every}th of {len(layers)} layers is named" if every > 1 else None


def trim_common(names: Sequence[str]) -> list[str]:
    """Module names without the leading parts that all of them share.

    >>> trim_common(["model.layers.0.up", "model.layers.1.up"])
    ['0.up', '1.up']
    """
    parts = [name.split(".") for name in names]
    shared = 0
    while parts and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [".".join(p[shared:]) for p in parts]


def _color_bar(metric: HeatMetric, mapper: Any, low: float, high: float) -> ColorBar:
    overrides: dict[float, str] = {}
    ticker: Any = BasicTicker(desired_num_ticks=5)
    if metric.log:
        decades = range(round(math.log10(low)), round(math.log10(high)) + 1)
        overrides = {10.0**k: f"{10.0**k:g}" for k in decades}
        ticker = FixedTicker(ticks=list(overrides))
    extra = {"formatter": CustomJSTickFormatter(code=POWER_TICKS)} if metric.low is None else {}
    return ColorBar(
        color_mapper=mapper,
        ticker=ticker,
        major_label_overrides=overrides,
        width=9,
        **extra,
        padding=4,
        margin=0,
        label_standoff=6,
        background_fill_color=None,
        bar_line_color=GRID,
        major_tick_line_color=None,
        major_label_text_font=FONT,
        major_label_text_font_size="11px",
        major_label_text_color=TEXT,
    )


def _cell_hover(
    image: Any, metric: HeatMetric, layers: Sequence[str], recorded: Floats, left: float, spacing: float
) -> Any:
    """Full module name, recorded step and value of the cell under the pointer."""
    # BokehJS inserts what a formatter returns as text, not as HTML.
    layer = CustomJSHover(
        args={"names": list(reversed(layers))}, code='return names[Math.floor(special_vars.y)] ?? "";'
    )
    step = CustomJSHover(
        args={"recorded": [float(c) for c in recorded], "left": left, "spacing": spacing},
        code="""
        const i = Math.min(Math.max(Math.floor((special_vars.x - left) / spacing), 0), recorded.length - 1);
        return Math.round(recorded[i]).toLocaleString("en-US");
    """,
    )
    power = "log2 scale" if metric.low is None else metric.column
    value = "@image{0.00}" if metric.low is None else "@image{0.000}"
    return hover(
        [image], [("", "$y{custom}"), ("step", "$x{custom}"), (power, value)], formatters={"$y": layer, "$x": step}
    )
