"""Microbatches and ranks: what is seen in parts equals what is seen at once."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from narrowgauge.compute.quant import BLOCK_1x128, PerTensor, quantize
from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.metrics import MOMENTS, OPERAND_COLUMNS, finalize
from narrowgauge.metrics import merge as oracle
from narrowgauge.observe.stats import merge, moments
from narrowgauge.observe.stats.host import Counted
from narrowgauge.observe.stats.merging import empty
from narrowgauge.observe.stats.moments import tallies_of
from narrowgauge.observe.stats.packing import Packer


def gathered(*tensors, fmt=E4M3FN, granularity=PerTensor(), scale=0.01):  # noqa: B008
    packer = Packer()
    for x in tensors:
        packer.add("a", tallies_of(x, quantize(x, fmt, granularity, scale=scale), None))
    sites, packed = packer.pack()
    assert sites == ["a"]
    return finalize(packed.numpy())


def vectors(packer, count):
    """What `room` gives, told apart by its first number."""
    found = [packer.room() for _ in range(count)]
    for number, vector in enumerate(found):
        np.testing.assert_array_equal(vector, MOMENTS.empty())
        vector[0] = number
    return found


@pytest.mark.parametrize("expected", [0, 2, 3, 8])
def test_what_is_counted_in_a_step_s_room_is_packed_as_if_it_lay_anywhere(expected):
    packer = Packer(expected)
    found = vectors(packer, 3)
    for number, vector in enumerate(found):
        packer.add(f"site {number}", [Counted(vector, np.zeros((2, 4)))])
    sites, table = packer.pack()
    assert sites == ["site 0", "site 1", "site 2"]
    assert table[:, 0].tolist() == [0, 1, 2]
    assert np.shares_memory(table.numpy(), found[0]) == (expected >= 3)  # then nothing was copied


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (2, 1), (0, 1)])
def test_room_that_was_not_used_or_in_another_order_changes_nothing(order):
    packer = Packer(3)
    found = vectors(packer, 3)
    for number in order:
        packer.add(f"site {number}", [Counted(found[number], np.zeros((2, 4)))])
    sites, table = packer.pack()
    assert sites == [f"site {number}" for number in order]
    assert table[:, 0].tolist() == list(order)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([E4M3FN, E5M2]),
    st.sampled_from([PerTensor(), BLOCK_1x128]),
    st.integers(0, 2**31),
)
def test_two_microbatches_equal_their_concatenation(M1, M2, fmt, granularity, seed):
    # Check 7, for every column: the p5s and the histograms are no exception.
    g = torch.Generator().manual_seed(seed)
    parts = [3 * torch.randn(M1, 140, generator=g) + 1, torch.randn(M2, 140, generator=g)]
    parts[0][:, 3] *= 100
    apart = gathered(*parts, fmt=fmt, granularity=granularity)
    at_once = gathered(torch.cat(parts), fmt=fmt, granularity=granularity)
    for name in OPERAND_COLUMNS:
        assert apart[name] == pytest.approx(at_once[name], rel=1e-5, abs=1e-7, nan_ok=True), name


def test_a_column_is_bad_only_if_its_sums_over_all_microbatches_are():
    """Two half-steps whose own p5 columns differ from that of the whole: percentiles cannot be averaged."""
    g = torch.Generator().manual_seed(0)
    quiet, loud = torch.randn(64, 40, generator=g), torch.randn(64, 40, generator=g)
    quiet[:, :4] *= 1e-8  # flushed here, fine there
    both, alone = gathered(quiet, loud), gathered(quiet)
    assert alone["p5_col_sqnr_db"][0] < 1
    assert both["p5_col_sqnr_db"][0] > 25


@settings(max_examples=25, deadline=None)
@example(2, 1, 298)  # whose third moments nearly cancel
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_the_device_merges_as_the_oracle_does(parts, sites, seed):
    rng = np.random.default_rng(seed)
    table = MOMENTS.empty(parts, sites)
    for i in range(parts):
        for j in range(sites):
            if rng.random() < 0.8:
                x = torch.from_numpy(rng.normal(rng.normal() * 5, 1, (3, 4)).astype(np.float32))
                table[i, j] = moments(x, quantize(x, E4M3FN)).numpy()
            if rng.random() < 0.3:
                table[i, j, MOMENTS["amax_ratio"]] = rng.choice([1.5, np.inf, np.nan])
                table[i, j, MOMENTS[("nan_count", "inf_count")[rng.integers(2)]]] = 1
    for width in (MOMENTS.width, MOMENTS.head_width):
        wanted = oracle(table)[..., :width]
        found = merge(torch.from_numpy(table[..., :width])).numpy()
        close = np.isclose(found, wanted, rtol=1e-12, atol=1e-300, equal_nan=True)
        n, m2, m3 = (MOMENTS.offsets[f"sample_{name}"] for name in ("n", "m2", "m3"))
        if m3 < width:  # its terms cancel: it is as exact as they are
            terms = wanted[..., m2] ** 1.5 / np.sqrt(np.maximum(wanted[..., n], 1))
            close[..., m3] = np.abs(found[..., m3] - wanted[..., m3]) <= 1e-12 * terms
        assert close.all()


def test_a_rank_without_data_changes_nothing():
    x = torch.randn(8, 16)
    one = moments(x, quantize(x, E4M3FN))
    assert torch.equal(merge(torch.stack([one, empty(one.device)])), one)
    assert torch.equal(moments(x[:0], quantize(x[:0], E4M3FN)), empty(one.device))


def test_very_many_microbatches_are_folded_on_the_way(monkeypatch):
    monkeypatch.setattr("narrowgauge.observe.stats.packing.PENDING", 3)
    parts = torch.randn(10, 8, 40, generator=torch.Generator().manual_seed(0))
    folded, at_once = gathered(*parts), gathered(parts.reshape(80, 40))
    for name in OPERAND_COLUMNS:
        assert folded[name] == pytest.approx(at_once[name], rel=1e-5, abs=1e-7, nan_ok=True), name


def test_microbatches_of_another_width_keep_their_columns():
    row = gathered(torch.randn(16, 40), torch.randn(16, 24))
    assert row["numel"][0] == 16 * 64
    assert row["p5_col_sqnr_db"][0] > 25


def test_moments_packed_by_someone_else_join_in():
    parts = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    packer = Packer()
    packer.add("a", tallies_of(parts[0], quantize(parts[0], E4M3FN, scale=0.01), None))
    packer.add_packed("a", moments(parts[1], quantize(parts[1], E4M3FN, scale=0.01)))
    found, wanted = finalize(packer.pack()[1].numpy()), gathered(*parts)
    for name in set(OPERAND_COLUMNS) - {"p5_col_sqnr_db"}:
        assert found[name] == pytest.approx(wanted[name], rel=1e-6, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("granularity", [PerTensor(), BLOCK_1x128], ids=str)
def test_a_microbatch_of_zeros_only_does_not_spoil_the_scales_of_the_others(granularity):
    x = torch.randn(16, 128) * 1e-4
    packer, alone = Packer(), Packer()
    for part in (torch.zeros_like(x), x, torch.zeros_like(x)):
        packer.add("a", tallies_of(part, quantize(part, E4M3FN, granularity), None))
    alone.add("a", tallies_of(x, quantize(x, E4M3FN, granularity), None))
    found, want = finalize(packer.pack()[1].numpy()), finalize(alone.pack()[1].numpy())
    for name in ("scale_min", "scale_max", "scale_std"):
        assert found[name] == want[name]
    assert found["scale_max"] < 1e-5


def test_both_laws_leave_out_the_scale_of_zeros():
    zeros, x = torch.zeros(4, 128), torch.randn(4, 128)
    parts = torch.stack([moments(each, quantize(each, E4M3FN)) for each in (zeros, x, zeros)])
    before = parts.clone()
    np.testing.assert_array_equal(merge(parts).numpy(), oracle(parts.numpy()))
    assert parts.equal(before)
