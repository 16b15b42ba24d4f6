"""The comparison that all integrations rest on: each statistic, once wrong or missing, is told."""

import math

import pytest
import torch
from tests.integrations.by_hand_recipes import RULES
from tests.integrations.by_hand_sums import Sums
from tests.integrations.differences import TOLERANCES, differences, finished, of_stages

KEY = (1, "0:input")
# What a tensor of zeros does not have.
NONE = ("amin", "lost_energy_pct", "p5_row_sqnr_db", "p5_col_sqnr_db", "kurtosis", "sqnr_db", "gain", "cosine")


def by_hand(x, turn=0, rule=None, experts=1):
    sums = Sums(turn, rule)
    sums.add(x, torch.float8_e4m3fn, experts)
    return finished(sums.row())


def wide(rows, columns):
    """Numbers of so wide a range that some are flushed."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) ** 7


CASES = {
    "whole": ((64, 48), None),
    "sampled": ((512, 96), None),
    **{recipe: ((64, 144), rules["weight"]) for recipe, rules in RULES.items()},
}


@pytest.fixture(params=CASES)
def want(request):
    shape, rule = CASES[request.param]
    return by_hand(wide(*shape), rule=rule)


@pytest.mark.parametrize("name", [*TOLERANCES, "binades", "sampled"])
def test_each_statistic_that_is_wrong_is_told(want, name):
    assert differences({KEY: {**want}}, {KEY: want}) == []
    wrong = {**want["binades"], "0": 0} if name == "binades" else 1.02 * want[name] + 0.2
    told = differences({KEY: {**want, name: wrong}}, {KEY: want})
    assert len(told) == 1
    assert told[0].startswith(f"{KEY} {name}: ")


@pytest.mark.parametrize("missing", [None, math.nan])
@pytest.mark.parametrize("name", NONE)
def test_a_statistic_that_one_side_alone_has_is_told(want, name, missing):
    without = {**want, name: missing}
    for found, hand in ((without, want), (want, without)):
        assert differences({KEY: found}, {KEY: hand}) == [f"{KEY} {name}: {found[name]!r}, by hand {hand[name]!r}"]
    assert differences({KEY: {**without, name: math.nan}}, {KEY: {**without, name: None}}) == []


def test_a_histogram_that_is_missing_is_told(want):
    told = differences({KEY: {**want, "sampled": 0, "binades": {}, "kurtosis": -99.0}}, {KEY: want})
    assert [line.removeprefix(f"{KEY} ").partition(":")[0] for line in told] == ["sampled", "binades", "kurtosis"]


def test_norms_of_stages_are_those_of_all_and_what_is_read_is_the_first_s():
    first = {"lr": 0.1, "tokens": 8, "grad_norm": 6.0, "param_norm": 3.0, "update_ratio": 1.0}
    last = {"lr": 0.1, "grad_norm": 8.0, "param_norm": 4.0, "update_ratio": 2.0}
    want = {"lr": 0.1, "tokens": 8, "grad_norm": 10.0, "param_norm": 5.0, "update_ratio": pytest.approx(73**0.5 / 5)}
    assert of_stages([first, last]) == want


def test_rows_of_one_side_alone_are_told(want):
    assert differences({}, {KEY: want}) == [f"not seen: {KEY}"]
    assert differences({KEY: want}, {}) == [f"seen, and not there: {KEY}"]


def test_by_hand_small_tensors_are_taken_as_a_whole_and_large_ones_by_rows_that_turn():
    small, large = wide(64, 48), wide(512, 96)
    assert by_hand(small, turn=1)["sampled"] == small.numel()
    assert by_hand(small, turn=1) == by_hand(small)
    s, k = 23, 5  # primes below 24 = 512 · 96 / 2048 and 6 = 512 · 96 / 8192
    first, second = by_hand(large), by_hand(large, turn=1)
    assert first["sampled"] == large[::s].numel() == sum(first["binades"].values())
    assert sum(first["counts"]["rows"].values()) == len(large[::k])
    numbers = large[1::s].double()
    moments = [((numbers - numbers.mean()) ** power).mean().item() for power in (2, 4)]
    assert second["kurtosis"] == pytest.approx(moments[1] / moments[0] ** 2, rel=1e-9)
    energy = large[1::k].double().square().sum().item() * 512 / len(large[1::k])
    assert second["sums"]["signal"] == pytest.approx(energy, rel=1e-12)
    assert second["l2"] == pytest.approx(large.double().norm().item(), rel=1e-12)


def test_by_hand_zeros_have_no_ratio_and_a_perfect_copy_an_infinite_one():
    zeros, copied = by_hand(torch.zeros(4, 8)), by_hand(448 * 0.5 ** torch.arange(4.0)[:, None])
    assert {name for name in TOLERANCES if zeros[name] is None} == {*NONE, "scale_min", "scale_max"}
    assert {name for name in TOLERANCES if copied[name] is None} == set()
    assert copied["sqnr_db"] == math.inf


# amax: the scales of `rowwise`, `blockwise`, `mxfp8` and `mxfp8-ocp`
SCALES = {
    448.0: (1.0, 1.0, 1.0, 1.0),
    450.0: (450 / 448, 2.0, 2.0, 1.0),  # the last one saturates
    512.0: (512 / 448, 2.0, 2.0, 2.0),
    3.0: (3 / 448, 2**-7, 2**-7, 2**-7),
    2.0**-140: (1e-12 / 448, 2.0**-127, 2.0**-127, 2.0**-127),
    0.0: (1e-12 / 448, 1.0, 2.0**-127, 2.0**-127),
}


@pytest.mark.parametrize("amax", SCALES)
def test_by_hand_scales_of_other_recipes_are_what_their_sources_say(amax):
    x = torch.full((1, 16), -amax / 3)
    x[0, 3] = -amax
    for (recipe, rules), want in zip(RULES.items(), SCALES[amax], strict=True):
        scale, inverse = rules["input"](x, 448.0)
        assert scale.expand(1, 16).flatten().tolist() == pytest.approx([want] * 16, rel=1e-7, abs=0.0), recipe
        assert inverse.expand(1, 16).flatten().tolist() == pytest.approx([1 / want] * 16, rel=1e-7), recipe


@pytest.mark.parametrize(
    ("recipe", "role", "rows", "columns"),
    [("rowwise", "weight", 1, 300), ("blockwise", "grad_output", 1, 128), ("blockwise", "weight", 128, 128)]
    + [(recipe, role, 1, 32) for recipe in ("mxfp8", "mxfp8-ocp") for role in ("input", "weight", "grad_output")],
)
def test_by_hand_one_number_changes_the_scale_of_its_granule_alone(recipe, role, rows, columns):
    x = torch.ones(140, 300)
    x[130, 290] = 1000.0
    scale = RULES[recipe][role](x, 448.0)[0].expand(140, 300)
    changed = (scale != scale[0, 0]).nonzero()
    first, last = changed.amin(0).tolist(), changed.amax(0).tolist()
    assert first == [130 // rows * rows, 290 // columns * columns]
    assert last == [min(first[0] + rows, 140) - 1, min(first[1] + columns, 300) - 1]
    assert len(changed) == (last[0] - first[0] + 1) * (last[1] - first[1] + 1)


@pytest.mark.parametrize("recipe", RULES)
def test_by_hand_experts_have_scales_of_their_own(recipe):
    experts = [wide(24, 64), 100 * wide(24, 64)]
    rule = RULES[recipe]["weight"]
    both, each = by_hand(torch.cat(experts), rule=rule, experts=2), [by_hand(x, rule=rule) for x in experts]
    assert both["mse"] == pytest.approx(sum(row["mse"] for row in each) / 2, rel=1e-12)
    assert (both["scale_min"], both["scale_max"]) == (each[0]["scale_min"], each[1]["scale_max"])


def test_by_hand_what_saturates_and_what_is_flushed_is_counted_under_the_scale_of_its_granule():
    x = torch.full((2, 64), 450.0)
    x[:, 1] = 2.0**-11
    x[0, 32:] = 2.0**-11
    found = {recipe: by_hand(x, rule=rules["input"]) for recipe, rules in RULES.items()}
    assert {recipe: row["saturation_pct"] for recipe, row in found.items() if row["saturation_pct"]} == {
        "mxfp8-ocp": pytest.approx(100 * (31 + 63) / 128)
    }
    flushed = {recipe: round(row["underflow_pct"] * 128 / 100) for recipe, row in found.items()}
    assert flushed == {"rowwise": 34, "blockwise": 34, "mxfp8": 2, "mxfp8-ocp": 2}
