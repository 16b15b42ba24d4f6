"""Which tensors come first, which recipe is recommended, and by which limit."""

import math

import pytest

from narrowgauge.observe.inspect.ranking import best, judge, order

HEALTHY = {
    "sqnr_db": 31.5,
    "gain": 1.0,
    "saturation_pct": 0.0,
    "lost_energy_pct": 0.0,
    "p5_row_sqnr_db": 31.0,
    "p5_col_sqnr_db": 31.0,
}


@pytest.mark.parametrize(
    ("numbers", "sign", "why"),
    [
        ({}, None, ""),
        ({"sqnr_db": 22.1, "p5_row_sqnr_db": 20.1, "p5_col_sqnr_db": 20.1, "gain": 0.971}, None, ""),
        ({"sqnr_db": 21.9}, "sqnr_db", "its signal is only 21.9 dB above the noise"),
        ({"p5_row_sqnr_db": 19.9}, "p5_row_sqnr_db", "a twentieth of its rows have 19.9 dB or less"),
        ({"p5_col_sqnr_db": 1.8}, "p5_col_sqnr_db", "a twentieth of its columns have 1.8 dB or less"),
        ({"p5_col_sqnr_db": -math.inf}, "p5_col_sqnr_db", "a twentieth of its columns have -inf dB or less"),
        ({"saturation_pct": 0.11}, "saturation_pct", "0.11% of its elements are beyond the largest code"),
        ({"lost_energy_pct": 2.5}, "lost_energy_pct", "2.5% of its energy is flushed to zero"),
        ({"gain": 2.0}, "gain", "what comes back is 2.0000 times what went in"),
        ({"sqnr_db": 10, "gain": 2.0}, "gain", "what comes back is 2.0000 times what went in"),  # the further one
        (dict.fromkeys(HEALTHY, math.nan), None, ""),
        ({"sqnr_db": math.inf, "p5_row_sqnr_db": math.inf}, None, ""),
    ],
)
def test_trouble_is_a_number_beyond_the_verdicts_limit(numbers, sign, why):
    judged = judge({**HEALTHY, **numbers})
    assert (judged.sign, judged.why) == (sign, why)
    assert (judged.badness > 1) == (sign is not None)


def test_the_worst_come_first_then_the_lowest_sqnr_then_those_without_any():
    numbers = {
        "fine": HEALTHY,
        "bad": {**HEALTHY, "gain": 1.2},
        "worse": {**HEALTHY, "saturation_pct": 50.0},
        "exact": {**HEALTHY, "sqnr_db": math.inf},
        "low": {**HEALTHY, "sqnr_db": 25.0},
        "zeros": dict.fromkeys(HEALTHY, math.nan),
    }
    ranked = sorted(numbers, key=lambda name: order(judge(numbers[name]), numbers[name], name))
    assert ranked == ["worse", "bad", "low", "fine", "exact", "zeros"]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"simple": {}, "fine": {"sqnr_db": 32.4}}, "simple"),
        ({"simple": {}, "fine": {"sqnr_db": 32.6}}, "fine"),
        ({"simple": {"sqnr_db": 90, "p5_row_sqnr_db": 3}, "fine": {}}, "fine"),
        ({"simple": {"saturation_pct": 1}, "fine": {"saturation_pct": 0.2}}, "fine"),
        ({"simple": dict.fromkeys(HEALTHY, math.nan), "fine": {}}, "fine"),
        ({"simple": dict.fromkeys(HEALTHY, math.nan)}, ""),
        ({"simple": {}, "fine": {"sqnr_db": math.inf}}, "fine"),
    ],
)
def test_the_best_is_the_simplest_that_is_healthy_and_near_the_highest(numbers, expected):
    numbers = {name: {**HEALTHY, **changed} for name, changed in numbers.items()}
    assert best({name: judge(row) for name, row in numbers.items()}, numbers) == expected
