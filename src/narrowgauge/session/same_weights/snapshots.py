"""When to measure at the same weights.

known length T      near 5%, 35%, 65%, 95% of T: early (large gradients), twice in the middle, and at the end
unknown             2, 8, 32, 128, ...: each four times as late as the one before
"""

from __future__ import annotations

FIRST, LAST = 0.05, 0.95
RATIO = 4


def snapshot_steps(total: int | None, count: int = 4) -> list[int]:
    """The steps (counted from 1) to measure on, ascending, at most `count`.

    Never step 1: the step before each one is needed, for scales that come from history.
    """
    if count <= 0:
        return []
    if total is None:
        return [2 * RATIO**i for i in range(count)]
    if total < 2:
        return []
    if count == 1:
        return [max(2, round(total / 2))]
    stride = (LAST - FIRST) / (count - 1)
    return sorted({min(total, max(2, round((FIRST + stride * i) * total))) for i in range(count)})
