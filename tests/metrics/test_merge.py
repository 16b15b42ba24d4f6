"""Merging parts must give what one look at everything gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.metrics import MOMENTS, finalize, merge
from narrowgauge.metrics.oracle import moments


def packed(x, scale=0.5):
    """Moments of x [M, K] with codes rounded to whole multiples of the scale."""
    x = np.asarray(x, dtype=np.float32)
    spread = np.full_like(x, scale)
    codes = np.round(x / scale).astype(np.float32)
    return moments(x, codes, spread, 1 / spread, scales=np.array([scale], np.float32), fmt_max=8.0, amax_ratio=1.0)


def test_chunks_of_two_normals_merge_to_the_known_spread():
    # Check 6: N(0,1) and N(10,1) together have std sqrt(1 + 25). A wrong sign in the law would leave NaN.
    rng = np.random.default_rng(0)
    parts = [packed(rng.normal(centre, 1, (1000, 200))) for centre in (0, 10)]
    assert finalize(merge(np.stack(parts))[None])["std"][0] == pytest.approx(5.10, abs=0.005)


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(shapes, st.floats(-100, 100), st.integers(0, 2**32 - 1))
def test_parts_equal_the_whole(heights, centre, seed):
    rng = np.random.default_rng(seed)
    parts = [rng.normal(centre * (i % 2), 1 + i, (M, 3)).astype(np.float32) for i, M in enumerate(heights)]
    whole = packed(np.concatenate(parts))
    merged = merge(np.stack([packed(part) for part in parts]))
    columns = MOMENTS["col_sqnr"]  # a column's SQNR needs its sums over all parts, which the vector does not hold
    merged[columns] = whole[columns] = 0
    scale_n = MOMENTS["scale_n"]  # each part brings its own scale
    merged[scale_n] = whole[scale_n]
    third = abs(whole[MOMENTS["sample_m2"]]) ** 1.5 * 1e-6 + 1e-9  # a skewness of zero has no relative precision
    assert merged == pytest.approx(whole, rel=1e-6, abs=third)


@given(st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_a_rank_without_data_changes_nothing(place, seed):
    x = np.random.default_rng(seed).normal(size=(4, 3))
    parts = [MOMENTS.empty()] * 5
    parts[place] = packed(x)
    assert merge(np.stack(parts)).tolist() == parts[place].tolist()


def test_nothing_merged_with_nothing_is_nothing():
    assert merge(MOMENTS.empty(3)).tolist() == MOMENTS.empty().tolist()


def test_the_order_of_parts_does_not_matter():
    rng = np.random.default_rng(1)
    parts = np.stack([packed(rng.normal(i, 1, (4, 3))) for i in range(5)])
    assert merge(parts) == pytest.approx(merge(parts[::-1]), rel=1e-12)


def test_many_sites_merge_side_by_side():
    rng = np.random.default_rng(2)
    parts = np.stack([[packed(rng.normal(i + j, 1, (4, 3))) for j in range(3)] for i in range(2)])
    for j in range(3):
        assert merge(parts)[j].tolist() == merge(parts[:, j]).tolist()


def test_every_slot_has_a_law_and_groups_cover_theirs():
    assert {slot.law for slot in MOMENTS.slots} == {"sum", "min", "max", "group"}
    in_groups = {name for group in MOMENTS.groups for name in group}
    assert in_groups == {slot.name for slot in MOMENTS.slots if slot.law == "group"}
    assert MOMENTS.width == sum(slot.width for slot in MOMENTS.slots)
    assert len({slot.name for slot in MOMENTS.slots}) == len(MOMENTS.slots)


def test_a_part_of_zeros_only_has_no_say_in_scales():
    # Its scale is what a rule gives to nothing (1, or the smallest that there is), beside 1e-4 it would be a jump.
    part = packed(np.full((4, 3), 1e-4), scale=1e-6)
    for zeros in (packed(np.zeros((4, 3)), scale=1.0), packed(np.zeros((4, 3)), scale=1e-30)):
        merged = finalize(merge(np.stack([zeros, part, part]))[None])
        assert merged["scale_min"][0] == merged["scale_max"][0] == np.float32(1e-6)
        assert merged["scale_std"][0] == 0
        assert merged["numel"][0] == 36


def test_zeros_merged_with_zeros_have_no_scale():
    merged = finalize(merge(np.stack([packed(np.zeros((4, 3)), scale=1.0)] * 2))[None])
    assert np.isnan([merged[name][0] for name in ("scale_min", "scale_max", "scale_std")]).all()
    assert merged["amax"][0] == merged["underflow_pct"][0] == 0


@pytest.mark.parametrize(("bad", "count"), [(np.nan, "nan_count"), (np.inf, "inf_count")])
def test_a_part_that_is_not_finite_hides_no_ratio_of_amaxes(bad, count):
    spoiled, fine = packed(np.ones((4, 3))), packed(np.ones((4, 3)))
    spoiled[[MOMENTS[count], MOMENTS["amax_ratio"]]] = 1, bad
    fine[MOMENTS["amax_ratio"]] = 1.5
    assert finalize(merge(np.stack([spoiled, fine, spoiled]))[None])["amax_ratio"][0] == 1.5
    for alone in (spoiled, merge(np.stack([spoiled, spoiled]))):
        assert np.isnan(finalize(alone[None])["amax_ratio"][0])
