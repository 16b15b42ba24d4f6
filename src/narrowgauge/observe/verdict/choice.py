"""Of several recipes without trouble, the one to take: the simplest that comes within `NEAR` of the best.

A tenth of a decibel is no reason for more scales.
"""

from __future__ import annotations

from collections.abc import Mapping

NEAR = 1.0  # dB


def simplest(sqnr_db: Mapping[str, float]) -> str:
    """The first recipe, from simple to fine, whose SQNR comes near the highest.

    >>> simplest({"current": 30.0, "rowwise": 33.5, "blockwise": 34.0})
    'rowwise'
    """
    highest = max(sqnr_db.values())
    return next(name for name, value in sqnr_db.items() if value >= highest - NEAR)
