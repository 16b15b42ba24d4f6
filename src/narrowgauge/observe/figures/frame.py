"""What all pictures share: type, grid, hover, and the escape from Bokeh's own markup.

Bokeh reads `$$...$$` in a label as TeX, for which it then looks for MathJax; module names and commands are the user's,
so every such string passes `plain` first. Tooltips escape HTML themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bokeh.events import DoubleTap
from bokeh.models import BasicTickFormatter, CustomJS, HoverTool, NumeralTickFormatter, Range1d
from bokeh.plotting import figure

from narrowgauge.observe.figures.palette import GRID, MUTED, TEXT

FONT = "Inter, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
# Whole powers of two as tick labels, for axes in log2.
POWER_TICKS = """
if (tick !== Math.round(tick)) return "";
return "2" + String(tick).replace(/[-0-9]/g, c => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]);
"""
_ZERO_WIDTH = "\u200b"


def plain(text: str) -> str:
    """The same text with TeX delimiters broken by a zero-width space, so that it is drawn as it is."""
    for mark in ("$$", "\\(", "\\[", "\\)", "\\]"):
        text = text.replace(mark, mark[0] + _ZERO_WIDTH + mark[1])
    return text


def shorten(name: str, width: int = 26) -> str:
    """A module name cut in its middle to at most `width` characters; both ends carry the meaning.

    >>> shorten("model.layers.11.feed_forward.down_proj", 20)
    'model.lay….down_proj'
    """
    if len(name) <= width:
        return name
    head = (width - 1) // 2
    return f"{name[:head]}…{name[-(width - 1 - head) :]}"


def distinct(names: Sequence[str], width: int = 26) -> list[str]:
    """Each name shortened; of those that would then read alike, other parts are left out.

    Numbers, which tell blocks apart, and the last part stay, and of the others as many from the end as have room.

    >>> distinct(["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"], 24)
    ['…0.self_attn.q_proj', '…1.self_attn.q_proj', 'lm_head']
    """
    cut = [shorten(name, width) for name in names]
    many = Counter(cut)
    other = [cut[i] if many[cut[i]] == 1 else _in_parts(name, width) for i, name in enumerate(names)]
    return [a if len(a) <= width else b for a, b in zip(other, cut, strict=True)]


def _in_parts(name: str, width: int) -> str:
    parts = name.split(".")
    kept = [part.isdigit() for part in parts[:-1]] + [True]
    for i in reversed(range(len(parts))):
        tried = [*kept[:i], True, *kept[i + 1 :]]
        if len(_joined(parts, tried)) > width:
            break  # or equal layers of two blocks would keep other parts, where a number is longer
        kept = tried
    return _joined(parts, kept)


def _joined(parts: Sequence[str], kept: Sequence[bool]) -> str:
    """The parts with dots between neighbours, "…" where some are left out."""
    text, gap = "", False
    for part, keep in zip(parts, kept, strict=True):
        if keep:
            text += ("…" if gap else "." if text else "") + part
        gap = not keep
    return text


def frame(
    *,
    height: int,
    x_label: str = "",
    y_label: str = "",
    x_range: Any = None,
    y_range: Any = None,
    zoom: str = "xbox_zoom",
    left: int = 4,
    **kwargs: Any,
) -> Any:
    """An empty figure in the house style: drag zooms, double click resets, no toolbar, no logo.

    `height` in pixels, the width is the page's. `zoom`: "xbox_zoom", "box_zoom" or "" for a picture that stays put.
    `left`: least pixels left of the axis, the same in pictures that are read one above the other.
    """
    ranges = {k: v for k, v in (("x_range", x_range), ("y_range", y_range)) if v is not None}
    p = figure(
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools=zoom or "",
        active_drag=zoom or None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=left,
        min_border_right=12,
        min_border_top=6,
        min_border_bottom=4,
        **ranges,
        **kwargs,
    )
    p.toolbar.logo = None
    if zoom:
        p.js_on_event(DoubleTap, CustomJS(args={"p": p}, code="p.reset.emit()"))
    p.xaxis.axis_label, p.yaxis.axis_label = x_label or None, y_label or None
    for axis in (p.xaxis, p.yaxis):
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_size, axis.major_label_text_font_size = "12px", "12px"
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = TEXT
        axis.axis_line_color = None
        axis.major_tick_line_color = axis.minor_tick_line_color = None
        axis.axis_label_standoff = 8
    if isinstance(p.yaxis[0].formatter, BasicTickFormatter):
        p.yaxis[0].formatter.power_limit_low = -5  # a loss of 0.007 reads better than 7.000e-3
    if x_label == "step":
        p.xaxis.ticker.min_interval = 1
        p.xaxis.formatter = NumeralTickFormatter(format="0,0")
    p.xaxis.axis_line_color = MUTED
    p.xaxis.major_tick_line_color, p.xaxis.major_tick_out, p.xaxis.major_tick_in = MUTED, 4, 0
    p.xgrid.grid_line_color, p.ygrid.grid_line_color = None, GRID
    return p


def hover(renderers: list[Any], tooltips: list[tuple[str, str]], **kwargs: Any) -> HoverTool:
    """A hover tool for these renderers. `tooltips`: (label, Bokeh field), values escaped by Bokeh."""
    return HoverTool(renderers=renderers, tooltips=tooltips, **kwargs)


def step_range(first: float, last: float, label_room: float = 0.0) -> Range1d:
    """The x range of all pictures over steps, wide enough for direct labels right of the last step.

    `label_room` is that room as a share of the range; one single step is given a range of two.
    """
    span = max(last - first, 1.0)
    return Range1d(first - 0.005 * span if last > first else first - 1, last + max(label_room, 0.005) * span)


def spread(positions: list[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Label positions at least `gap` apart, as near to the wanted ones as pushing pairs apart gets them.

    Order is kept; [n] -> [n], in the axis's own unit. The stack is then moved into [low, high]; if it does not fit, its
    upper end is the one that stays inside.
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [positions[i] for i in order]
    for _ in range(50):
        moved = False
        for i in range(len(placed) - 1):
            lack = gap - (placed[i + 1] - placed[i])
            if lack > 1e-12 * max(abs(gap), 1e-300):
                placed[i] -= lack / 2
                placed[i + 1] += lack / 2
                moved = True
        if not moved:
            break
    if placed:
        # Move as a whole, then the ends only as far as they must: labels that were fine keep their places.
        for i in range(len(placed)):
            placed[i] = max(placed[i], low + i * gap)
        for i in reversed(range(len(placed))):
            placed[i] = min(placed[i], high - (len(placed) - 1 - i) * gap)
    result = [0.0] * len(positions)
    for rank, i in enumerate(order):
        result[i] = placed[rank]
    return result
