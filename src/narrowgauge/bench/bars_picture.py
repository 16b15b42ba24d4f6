"""Rows of a benchmark as bars, each cut into its parts: where a step's time goes, what watching costs.

Plain SVG text as in `map_picture`: the same rows give the same file byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from narrowgauge.observe.figures.palette import FAIL, GRID, INK, PAPER, TEXT

BAR, STEP, LEFT, RIGHT, TOP, WIDE = 20, 28, 150, 150, 76, 560
FONT = "Inter, Helvetica, Arial, sans-serif"


class Bar(NamedTuple):
    """A bar: what it is, its parts in order, and what stands behind its end."""

    label: str
    parts: Mapping[str, float]
    note: str = ""


def svg(title: str, unit: str, bars: Sequence[Bar], colours: Mapping[str, str], limit: float | None = None) -> str:
    """Draw the bars below each other on one axis that begins at zero; `limit` is a line across all of them."""
    longest = max([sum(bar.parts.values()) for bar in bars] + [limit or 0.0])
    tick = _tick(longest)
    end = tick * math.ceil(longest / tick)
    scale = WIDE / end
    foot = TOP + len(bars) * STEP
    width, height = LEFT + WIDE + RIGHT, foot + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        _text(16, 24, title, size=15, fill=INK),
        *_legend(colours),
    ]
    for number in range(round(end / tick) + 1):
        x = LEFT + number * tick * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{foot}" stroke="{GRID}"/>')
        parts.append(_text(x, foot + 14, f"{number * tick:g}", anchor="middle"))
    parts.append(_text(LEFT + WIDE / 2, foot + 32, unit, anchor="middle"))
    for row, bar in enumerate(bars):
        y, x = TOP + row * STEP, float(LEFT)
        parts.append(_text(LEFT - 8, y + 14, bar.label, anchor="end", fill=INK))
        for name, value in bar.parts.items():
            long = value * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, long):.1f}" height="{BAR}" fill="{colours[name]}">'
                f"<title>{escape(name)}: {value:g} {escape(unit)}</title></rect>"
            )
            x += long
        parts.append(_text(x + 6, y + 14, bar.note, fill=INK))
    if limit is not None:
        x = LEFT + limit * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{foot}" stroke="{FAIL}" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(colours: Mapping[str, str]) -> list[str]:
    parts, x = [], float(LEFT)
    for name, colour in colours.items():
        parts.append(f'<rect x="{x:.1f}" y="42" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, 52, name))
        x += 34 + 6.2 * len(name)
    return parts


def _tick(longest: float) -> float:
    """A round distance, so that four to ten of them reach the longest bar's end.

    >>> _tick(176.0), _tick(2.4)
    (20.0, 0.5)
    """
    power = 10.0 ** math.floor(math.log10(longest)) if longest > 0 else 1.0
    return next(part * power for part in (0.1, 0.2, 0.5, 1.0) if longest / (part * power) <= 10)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, fill: str = TEXT) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>'
    )
