"""One colour per variant, everywhere; a second set of colours for a dark page.

Variants take the Okabe-Ito colours, which stay apart under the three common colour blindnesses and in grey print
by their lightness. The baseline is ink and its noise twin is light grey: they are the paper that variants are
judged on, not competitors. Heatmaps: where a value can be bad the dark end is the bad one; gain diverges around 1.

Source: Okabe & Ito, "Color Universal Design"; ColorBrewer's YlOrBr, PuOr and Blues, all marked colour-blind safe.
"""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.palettes import Blues9, PuOr11, YlOrBr9, interp_palette

INK = "#1d1c1a"  # baseline, axis lines
TEXT = "#55524c"  # tick and axis labels
MUTED = "#8f8b83"  # annotations
GRID = "#e9e6e0"
PAPER = "#fffefc"
NOISE = "#b9b5ac"
BAND = "#d9d5cd"  # the noise band's fill
PASS = "#3f7f6b"  # the two thresholds of the loss gap
FAIL = "#b3432f"

_NAMED = {
    "current": "#0072b2",
    "delayed": "#d55e00",
    "blockwise": "#009e73",
    "rowwise": "#cc79a7",
    "mxfp8": "#9a6a00",
    "static": "#56a5d6",
}
_SPARE = ("#5b4ea3", "#7d8a00", "#a8324e", "#2f8f9d")

# Each light colour above, and what it becomes on a dark page; the page swaps them before it draws.
DARK = {
    INK: "#f0ede6",
    TEXT: "#b3afa6",
    MUTED: "#8a867e",
    GRID: "#33322f",
    PAPER: "#191917",
    NOISE: "#77736b",
    BAND: "#46443f",
    PASS: "#6fb9a1",
    FAIL: "#e2806d",
    "#0072b2": "#4aa8e0",
    "#d55e00": "#f2853a",
    "#009e73": "#2fc79a",
    "#cc79a7": "#dd95bd",
    "#9a6a00": "#d9a437",
    "#56a5d6": "#8cc8ec",
    "#5b4ea3": "#9b90dd",
    "#7d8a00": "#b4c22f",
    "#a8324e": "#e0748d",
    "#2f8f9d": "#63c1cf",
}

# Light to dark: more is worse. Bent, so that the healthy half stays pale and dark is kept for what deserves a look.
_BENT = interp_palette(tuple(reversed(YlOrBr9)), 256)
HARM = tuple(_BENT[round(255 * (i / 63) ** 1.7)] for i in range(64))
HARM_LOW = tuple(reversed(HARM))  # dark to light: less is worse
DIVERGING = tuple(interp_palette(PuOr11, 65))
SEQUENCE = tuple(interp_palette(tuple(reversed(Blues9)), 64))  # light to dark, neither end is bad


def variant_colors(names: Sequence[str]) -> dict[str, str]:
    """The colour of each run, by its name.

    `names` in the order of the report. "baseline" is ink, "noise" light grey; a recipe known by name keeps its colour
    in every report, others take spare colours in order of appearance (a name such as "current-2" is another).
    """
    colors: dict[str, str] = {}
    spare = 0
    for name in names:
        if name == "baseline":
            colors[name] = INK
        elif name == "noise":
            colors[name] = NOISE
        elif name in _NAMED:
            colors[name] = _NAMED[name]
        else:
            colors[name] = _SPARE[spare % len(_SPARE)]
            spare += 1
    return colors
