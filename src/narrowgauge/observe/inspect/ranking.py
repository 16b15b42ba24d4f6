"""Which tensors a recipe hurts most, and which recipe a tensor should have.

    badness = the furthest of the verdict's signs beyond its limit, in multiples of it (verdict.worst)
    trouble: badness above 1        without trouble tensors are ordered by SQNR, lowest first

The best recipe is the simplest, in the catalog's order, of those without trouble that come near the highest SQNR
(`verdict.choice`). If every one is in trouble, the one in least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.observe.verdict.choice import simplest
from narrowgauge.observe.verdict.worst import SIGNS, Sign

# Of the verdict's signs those that a recipe causes: a NaN in the tensor is listed apart, and nothing is multiplied.
WHY = {
    "gain": "what comes back is {value:.4f} times what went in",
    "saturation_pct": "{value:.3g}% of its elements are beyond the largest code",
    "lost_energy_pct": "{value:.3g}% of its energy is flushed to zero",
    "p5_col_sqnr_db": "a twentieth of its columns have {value:.1f} dB or less",
    "p5_row_sqnr_db": "a twentieth of its rows have {value:.1f} dB or less",
    "sqnr_db": "its signal is only {value:.1f} dB above the noise",
}
JUDGED = tuple(sign for sign in SIGNS if sign.metric in WHY)


@dataclass(frozen=True)
class Judgement:
    """How one recipe does on one tensor.

    Args:
        badness: above 1 is trouble.
        sign: which metric says so; None without trouble.
        why: the same in words; "" without trouble.
    """

    badness: float
    sign: str | None = None
    why: str = ""


def judge(numbers: Mapping[str, Any]) -> Judgement:
    """How a recipe does, by what it would make of the tensor."""
    badness = [_badness(sign, numbers.get(sign.metric, math.nan)) for sign in JUDGED]
    worst = max(badness)
    if not worst > 1:
        return Judgement(worst)
    sign = JUDGED[badness.index(worst)]
    return Judgement(worst, sign.metric, WHY[sign.metric].format(value=numbers[sign.metric]))


def _badness(sign: Sign, value: float) -> float:
    return -math.inf if math.isnan(value) else sign.badness(value)


def order(judged: Judgement, numbers: Mapping[str, Any], name: str) -> tuple[float, float, str]:
    """Sort key: the worst first, those in trouble by how much and the others by SQNR."""
    sqnr = numbers["sqnr_db"]
    trouble = judged.badness if judged.sign else 0.0
    return -trouble, math.inf if math.isnan(sqnr) else sqnr, name


def best(judged: Mapping[str, Judgement], numbers: Mapping[str, Mapping[str, Any]]) -> str:
    """The recipe to take, of those judged in the order from simple to fine; "" if no number says anything."""
    sqnr = {name: row["sqnr_db"] for name, row in numbers.items() if not math.isnan(row["sqnr_db"])}
    if not sqnr:
        return ""
    healthy = {name: value for name, value in sqnr.items() if judged[name].sign is None}
    if not healthy:
        return min(sqnr, key=lambda name: judged[name].badness)
    return simplest(healthy)
