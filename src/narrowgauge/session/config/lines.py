"""On which line of a TOML file a key stands: the standard library's parser tells values only.

    path present in  lines[:j]   and absent in  lines[:i],  i < j both whole statements   ->   it begins on line i + 1

Every prefix of a TOML file that ends between two statements is a TOML file itself. So the parser that read the whole
also finds the place, whatever way the key is written: dotted, in a table's header, inline, over several lines.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

Path = Sequence[str | int]


def line_of(text: str, path: Path) -> int:
    """The line, counted from 1, where the statement begins that gives `path`, or as much of it as the file has.

    >>> line_of('seed = 1\\n[watch]\\nevery = 2\\n', ("watch", "every"))
    3
    """
    text = text.replace("\r\n", "\n")
    whole = tomllib.loads(text)
    path = list(path)
    while path and not _has(whole, path):
        path.pop()
    lines = text.split("\n")
    begins = 1
    for end in range(1, len(lines) + 1):
        try:
            known = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a statement
        if _has(known, path):
            return begins
        begins = end + 1
    return begins


def _has(data: Any, path: Path) -> bool:
    try:
        for part in path:
            data = data[part]
    except (KeyError, IndexError, TypeError):
        return False
    return True
