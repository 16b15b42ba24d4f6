"""What the settings asked for and a run did not have, read from all of its ranks when it is over.

A rank may hold a part of the model: a glob that matched nothing on one of them is told only if it did so on every one.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from narrowgauge.session.plan import Plan

NOT_FOUND = ("matched nothing in this program", "no recorded site has it")


WISHES = ("steps", "sites", "skip", "roles", "metrics")  # of `[watch]`: for tensors


def unjudged(plan: Plan) -> list[str]:
    """What a program's settings ask of tensors that nobody quantizes, which never come; nothing of a comparison's."""
    asked = [*(f"watch.{key}" for key in WISHES if plan.watch.get(key)), *(["dump"] if plan.dump else [])]
    if plan.judge or not plan.compiling or not asked:
        return []
    *first, last = asked
    return [
        "what_if is empty, so no recipe quantizes layers that narrowgauge did not convert: this run has nothing of "
        f'{" and ".join(filter(None, [", ".join(first), last]))}. Write what_if = ["current"], or leave it out.'
    ]


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
