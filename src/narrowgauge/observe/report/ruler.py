"""A small ruler beside each variant: the loss gap as a dot, the noise band and the two thresholds under it. Inline SVG.

The axis is linear over ±1.5 %; a gap beyond it sits at the edge with an arrow. Colours come from the page's CSS
classes, so that the ruler follows a dark page and prints.
"""

from __future__ import annotations

import math

from narrowgauge.observe.report import words
from narrowgauge.observe.verdict.gap import PASS_PCT, WATCH_PCT
from narrowgauge.observe.verdict.types import VariantVerdict

WIDTH, HEIGHT, LIMIT = 300, 54, 1.5
_MIDDLE = 22


def svg(v: VariantVerdict) -> str:
    """The ruler of one variant; "" when it has no gap. Holds numbers only, no text of the user's."""
    if v.outcome == "unjudged" or v.gap_pct is None or not math.isfinite(v.gap_pct):
        return ""
    band = ""
    if v.band_pct is not None:
        half = min(v.band_pct, LIMIT)
        left, width = _x(-half), _x(half) - _x(-half)
        band = f'<rect class="band" x="{left:.1f}" y="{_MIDDLE - 9}" width="{width:.1f}" height="18" rx="2"/>'
    ticks = "".join(
        f'<line class="{kind}" x1="{_x(at):.1f}" x2="{_x(at):.1f}" y1="{_MIDDLE - 11}" y2="{_MIDDLE + 11}"/>'
        for at, kind in ((PASS_PCT, "pass"), (WATCH_PCT, "fail"), (0.0, "zero"))
    )
    labels = "".join(
        f'<text x="{_x(at):.1f}" y="{HEIGHT - 4}" text-anchor="middle">{text}</text>'
        for at, text in ((-1.0, "−1"), (0.0, "0"), (PASS_PCT, "¼"), (1.0, "+1 %"))
    )
    x = _x(v.gap_pct)
    if abs(v.gap_pct) > LIMIT:
        side = 1 if v.gap_pct > 0 else -1
        mark = f'<path class="mark" d="M{x + 2 * side:.1f} {_MIDDLE} l{-11 * side} -7 v14 z"/>'
    else:
        mark = f'<circle cx="{x:.1f}" cy="{_MIDDLE}" r="6" class="mark"/>'
    says = f"loss gap {words.percent(v.gap_pct)}"
    if v.band_pct is not None:
        says += f", noise band ±{words.percent(v.band_pct, signed=False)}"
    return (
        f'<svg class="ruler" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{says}">'
        f'<title>{says}</title><line class="axis" x1="4" x2="{WIDTH - 4}" y1="{_MIDDLE}" y2="{_MIDDLE}"/>'
        f"{band}{ticks}{mark}{labels}</svg>"
    )


def _x(pct: float) -> float:
    clipped = min(max(pct, -LIMIT), LIMIT)
    return WIDTH / 2 + clipped / LIMIT * (WIDTH / 2 - 12)
