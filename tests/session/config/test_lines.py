"""The line of a key, however it is written."""

import pytest

from narrowgauge.session.config.lines import line_of

TEXT = '''# a comment
seed = 1

[watch]   # a table
roles = [
  "input",  # [[dump]]
]
note = """
[convert]
"""
convert.skip = []
[[dump]]
sites = ["a"]

[[dump]]
  sites = ["b"]
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("seed",), 2),
        (("watch",), 4),
        (("watch", "roles"), 5),
        (("watch", "roles", 0), 5),
        (("watch", "note"), 8),
        (("watch", "convert", "skip"), 11),
        (("dump", 0), 12),
        (("dump", 0, "sites"), 13),
        (("dump", 1), 15),
        (("dump", 1, "sites", 0), 16),
        (("dump", 1, "steps"), 15),
        (("nothing", "here"), 1),
    ],
)
def test_a_key_is_where_its_statement_begins(path, line):
    assert line_of(TEXT, path) == line


def test_lines_of_a_file_from_windows():
    assert line_of(TEXT.replace("\n", "\r\n"), ("dump", 1, "sites")) == 16
