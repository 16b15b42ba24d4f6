"""The JSON is a promise to whoever reads results later; the table says the same to people."""

import json

from narrowgauge.bench.result import SCHEMA, Result, aligned, figures

FIELDS = {
    "schema", "benchmark", "date", "hardware", "versions", "git_revision", "measured", "reason", "settings", "ceilings",
    "rows", "notes",
}  # fmt: skip
ROWS = [
    {"variant": "bf16", "ms": 2.0, "phases": {"gemm": 1.5, "rest": 0.5}, "kernels": [["a", 1.0]]},
    {"variant": "current", "ms": 1.25, "joules": None, "phases": {"gemm": 0.75, "rest": 0.5}},
]


def test_the_fields_are_pinned():
    found = json.loads(Result("step", {"size": "tiny"}, ROWS, {"copy_tbytes": 1.0}, ["a note"]).to_json())
    assert set(found) == FIELDS
    assert found["schema"] == SCHEMA == 1
    assert found["measured"] is True
    assert found["rows"] == ROWS
    assert found["settings"] == {"size": "tiny"}
    assert {"python", "torch"} <= set(found["versions"])


def test_each_row_has_a_line_of_its_own():
    text = Result("step", {}, ROWS).to_json()
    assert sum(line.lstrip().startswith('{"variant"') for line in text.splitlines()) == 2


def test_nothing_measured_is_json_too():
    found = json.loads(Result("step", {}, reason="no GPU here").to_json())
    assert (found["measured"], found["reason"], found["rows"]) == (False, "no GPU here", [])


def test_the_table_shows_numbers_nested_ones_apart_and_notes():
    text = Result("step", {}, ROWS, notes=["energy: none"]).table()
    assert "variant    ms  joules" in text
    assert "current  1.25       -" in text
    assert "phases\nvariant  gemm  rest" in text
    assert "kernels" not in text
    assert text.endswith("energy: none")


def test_columns_are_those_of_all_rows():
    assert aligned([{"a": "x"}, {"a": "y", "b": 2}]) == "a  b\nx  -\ny  2"


def test_figures_keep_significant_digits():
    assert [figures(x) for x in (0.000123456, 123456.7, 0.0, 1.0)] == [0.0001235, 123500.0, 0.0, 1.0]
