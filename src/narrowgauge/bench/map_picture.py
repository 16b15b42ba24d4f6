"""The speed map as a picture: one panel per recipe and token count, K down, N across, the speed-up in every cell.

    colour = log2(speed-up), from half the speed of BF16 to twice; white is as fast as BF16

Plain SVG text, without a browser or a drawing library, so that the same map gives the same file byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from narrowgauge.observe.figures.palette import DIVERGING, INK, PAPER, TEXT

CELL_W, CELL_H, GAP, LEFT, TOP = 42, 22, 26, 92, 66
FONT = "Inter, Helvetica, Arial, sans-serif"


def svg(rows: Sequence[Mapping[str, Any]], title: str, tokens: Sequence[int], column: str = "step") -> str:
    """Draw `column` of a map's rows for those token counts (M) that it has, one line of panels each."""
    points = {(row["recipe"], row["M"], row["K"], row["N"]): float(row[column]) for row in rows}
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    K, N = sorted({row["K"] for row in rows}), sorted({row["N"] for row in rows})
    shown = [M for M in tokens if any(row["M"] == M for row in rows)]
    wide, high = len(N) * CELL_W, len(K) * CELL_H
    width = LEFT + len(recipes) * (wide + GAP)
    height = TOP + len(shown) * (high + GAP + 20) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        _text(LEFT, 22, title, size=15, fill=INK),
    ]
    for across, recipe in enumerate(recipes):
        x = LEFT + across * (wide + GAP)
        parts.append(_text(x + wide / 2, 46, recipe, anchor="middle", size=13, fill=INK))
        for down, M in enumerate(shown):
            y = TOP + down * (high + GAP + 20)
            parts += _panel(x, y, {(k, n): points[recipe, M, k, n] for k in K for n in N}, K, N)
            if across == 0:
                parts.append(_text(10, y + high / 2, f"M = {_short(M)}", size=12, fill=INK))
                parts += [
                    _text(x - 6, y + (row + 0.5) * CELL_H + 4, _short(k), anchor="end") for row, k in enumerate(K)
                ]
    parts.append(
        _text(
            LEFT, height - 8, "down: K, input features;  across: N, output features;  M: tokens;  1.00: as fast as BF16"
        )
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(x: float, y: float, cells: Mapping[tuple[int, int], float], K: Sequence[int], N: Sequence[int]) -> list[str]:
    parts = []
    for row, k in enumerate(K):
        for col, n in enumerate(N):
            value = cells[k, n]
            left, top = x + col * CELL_W, y + row * CELL_H
            fill, ink = _colours(value)
            parts.append(f'<rect x="{left}" y="{top}" width="{CELL_W - 1}" height="{CELL_H - 1}" fill="{fill}"/>')
            parts.append(_text(left + CELL_W / 2, top + 15, f"{value:.2f}", anchor="middle", fill=ink))
    y += len(K) * CELL_H + 13
    return parts + [_text(x + (col + 0.5) * CELL_W, y, _short(n), anchor="middle") for col, n in enumerate(N)]


def _colours(value: float) -> tuple[str, str]:
    """The cell's colour and that of the number in it."""
    share = min(1.0, max(-1.0, math.log2(value)))
    half = len(DIVERGING) // 2
    return DIVERGING[half - round(share * half)], (PAPER if abs(share) > 0.62 else INK)


def _short(number: int) -> str:
    """8192 -> 8k."""
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, fill: str = TEXT) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>'
