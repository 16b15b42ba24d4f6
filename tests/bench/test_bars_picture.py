"""Bars: well formed, as long as their numbers, the same file for the same rows."""

import xml.etree.ElementTree as ET

import pytest

from narrowgauge.bench import pictures
from narrowgauge.bench.bars_picture import Bar, svg

SVG = "{http://www.w3.org/2000/svg}"
STEP = {
    "hardware": "a GPU",
    "date": "2026-01-01",
    "settings": {"size": "tiny"},
    "rows": [
        {"variant": "bf16", "ms": 12.0, "x_bf16": 1.0, "phases": {"gemm": 10.0, "quantize": 0.0, "data": 0.0}},
        {"variant": "current", "ms": 8.0, "x_bf16": 1.5, "phases": {"gemm": 5.0, "quantize": 2.5, "data": 0.0}},
        {"variant": "broken", "error": "out of memory"},
    ],
}


def rects(text):
    return [(node.attrib["fill"], float(node.attrib["width"])) for node in ET.fromstring(text).iter(f"{SVG}rect")]


def words(text):
    return {node.text for node in ET.fromstring(text).iter(f"{SVG}text")}


def test_a_bar_is_as_long_as_its_number():
    text = svg(
        "a < b", "ms", [Bar("one", {"x": 2.0, "y": 1.0}, "3 ms"), Bar("two", {"x": 4.0})], {"x": "#111", "y": "#222"}
    )
    x = [width for fill, width in rects(text) if fill == "#111" and width != 11]
    y = [width for fill, width in rects(text) if fill == "#222" and width != 11]
    assert x == pytest.approx([2 * y[0], 4 * y[0]])
    assert {"a < b", "ms", "one", "two", "3 ms", "x", "y"} <= words(text)
    assert text == svg(
        "a < b", "ms", [Bar("one", {"x": 2.0, "y": 1.0}, "3 ms"), Bar("two", {"x": 4.0})], {"x": "#111", "y": "#222"}
    )


def test_phases_leave_out_what_is_nowhere_and_who_failed():
    shown = words(pictures.phases(STEP))
    assert {"bf16", "current", "gemm", "quantize", "8.0 ms   1.50x"} <= shown
    assert not {"data", "broken"} & shown


def test_a_step_that_would_shrink_all_others_is_told_in_words():
    rows = [*STEP["rows"], {"variant": "fp32", "ms": 90.0, "x_bf16": 0.1, "phases": {"gemm": 90.0}}]
    shown = words(pictures.phases({**STEP, "rows": rows}))
    assert "ms of one profiled step (not drawn: fp32 90.0)" in shown
    assert not {"fp32", "50"} & shown
    assert "ms of one profiled step" in words(pictures.phases(STEP))


def test_overhead_below_nothing_is_an_empty_bar_with_its_number():
    row = {"recipe": "current", "every_1_overhead_pct": 2.0, "every_10_overhead_pct": -0.1}
    text = pictures.overheads([{**STEP, "rows": [row]}])
    assert {"tiny current", "2.00 % every step", "-0.10 % every 10 steps"} <= words(text)
    assert 0.0 in [width for _, width in rects(text)]


def test_a_picture_of_several_runs_says_when_they_were():
    row = {"recipe": "current", "every_1_overhead_pct": 2.0, "every_10_overhead_pct": 0.2}
    runs = [{**STEP, "date": date, "rows": [row]} for date in ("2026-02-03", "2026-01-02")]
    assert "(a GPU, 2026-01-02 to 2026-02-03)" in pictures.overheads(runs)
    assert "(a GPU, 2026-02-03)" in pictures.overheads(runs[:1])
