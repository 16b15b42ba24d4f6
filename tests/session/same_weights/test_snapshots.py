from __future__ import annotations

import pytest

from narrowgauge.session.same_weights import snapshot_steps


@pytest.mark.parametrize(
    ("total", "steps"),
    [
        (100, [5, 35, 65, 95]),
        (1000, [50, 350, 650, 950]),
        (10, [2, 4, 6, 10]),
        (4, [2, 3, 4]),
        (2, [2]),
        (1, []),
        (0, []),
        (None, [2, 8, 32, 128]),
    ],
)
def test_spread(total: int | None, steps: list[int]) -> None:
    assert snapshot_steps(total) == steps


@pytest.mark.parametrize("total", [*range(60), 997])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_always_inside_and_never_first(total: int, count: int) -> None:
    steps = snapshot_steps(total, count)
    assert steps == sorted(set(steps))
    assert len(steps) <= count
    assert all(2 <= s <= total for s in steps)
