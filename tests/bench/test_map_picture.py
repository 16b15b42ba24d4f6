"""The picture of a map: a cell per shape, the same file for the same map."""

import xml.etree.ElementTree as ET

from narrowgauge.bench.map_picture import svg

ROWS = [
    {"recipe": recipe, "M": M, "K": 512, "N": N, "step": value}
    for recipe, M, N, value in [("current", 8192, 512, 0.25), ("current", 8192, 1024, 2.0), ("rowwise", 8192, 512, 1.0),
                                ("rowwise", 8192, 1024, 1.0)]
]  # fmt: skip


def test_it_is_well_formed_and_shows_every_number():
    text = svg(ROWS, "a < b", tokens=(2048, 8192))
    root = ET.fromstring(text)
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "current", "rowwise", "M = 8k", "0.25", "2.00"} <= set(words)
    assert "M = 2k" not in words
    assert text == svg(ROWS, "a < b", tokens=(2048, 8192))


def test_slower_and_faster_look_different_and_equal_is_the_middle():
    colours = {
        node.attrib["fill"] for node in ET.fromstring(svg(ROWS, "", (8192,))).iter("{http://www.w3.org/2000/svg}rect")
    }
    assert len(colours) == 4  # paper, slower, equal, faster
