"""Why ranks are not merged any more, in words. What gloo says of a lost connection is long and names none."""

from __future__ import annotations

import re
from pathlib import Path

from narrowgauge.errors import RunError
from narrowgauge.observe.store import manifest as manifests

PLACE = re.compile(r"\[[^\[\]\s]*\.(?:cc|cpp|h|hpp):\d+\]\s*")  # of C++ source
CLOSED = re.compile(r"closed by peer|reset by peer|Broken pipe", re.IGNORECASE)


def in_words(error: Exception, folder: Path, rank: int, world: int) -> str:
    """What `error` means, in one line; from rank `rank` of `world`, whose run is in `folder`.

    >>> in_words(RuntimeError("[../third_party/gloo/pair.cc:5] Connection closed by peer [::1]:9. GLHF!"), Path(), 0, 2)
    'rank 1 is gone (RuntimeError: Connection closed by peer [::1]:9)'
    """
    text = str(error)
    first = next(iter(PLACE.sub("", text).strip().splitlines()), "").strip()
    if "gloo" not in text.lower():
        return f"{type(error).__name__}: {first}".rstrip(": ")
    said = f"{type(error).__name__}: {first.split('. ')[0]}"
    others = [other for other in range(world) if other != rank]
    closed = bool(CLOSED.search(text))
    gone = others if closed and len(others) == 1 else [other for other in others if _gone(folder, other)]
    if gone:
        return f"rank {', '.join(map(str, gone))} is gone ({said})"
    return f"another rank is gone ({said})" if closed else said


def _gone(folder: Path, rank: int) -> bool:
    """Whether the process that writes this rank's part is known to be gone."""
    try:
        return manifests.is_alive(manifests.read(folder, rank)) is False
    except (OSError, RunError):
        return False
