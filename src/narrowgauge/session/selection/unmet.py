"""What the settings asked for and a run did not have, read from all of its ranks when it is over.

A rank may hold a part of the model: a glob that matched nothing on one of them is told only if it did so on every one.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

NOT_FOUND = ("matched nothing in this program", "no recorded site has it")


def unmet(folder: Path) -> list[str]:
    """One sentence each, the lowest rank's words; none of a run that left no facts."""
    ranks: list[list[str]] = []
    for path in sorted(folder.glob("run*.json"), key=lambda path: (len(path.name), path.name)):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            told = json.loads(path.read_text()).get("meta", {}).get("unmet")
            if told is not None:
                ranks.append(list(told))
    of_all = set.intersection(*({_what(text) for text in told} for told in ranks)) if ranks else set()
    found = {
        _what(text): text
        for told in reversed(ranks)
        for text in told
        if _what(text) in of_all or not any(words in text for words in NOT_FOUND)
    }
    return list(found.values())


def _what(text: str) -> str:
    """Without the hint, which depends on what a rank has."""
    return text.partition(";")[0]
