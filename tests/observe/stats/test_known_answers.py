"""Numbers that anyone can check by hand, and blind spots that one metric has and another has not."""

import math

import pytest
import torch

from narrowgauge.compute.quant import Block, PerColumn, PerRow, PerTensor, QTensor, quantize
from narrowgauge.errors import ShapeError, UsageError
from narrowgauge.formats import E4M3FN, E4M3FNUZ, E5M2
from narrowgauge.metrics import CATALOG, HISTOGRAMS, OPERAND_COLUMNS, by_name, finalize
from narrowgauge.observe.stats import measure, moments
from narrowgauge.observe.stats.scales import scale_values


def watched(x, q):
    """The same metrics as `measure`, by the way that the watch takes."""
    return {name: column[0].tolist() for name, column in finalize(moments(x, q)[None].numpy()).items()}


both_ways = pytest.mark.parametrize("metrics", [measure, watched])


@both_ways
def test_underflow_counts_what_was_not_zero_and_became_zero(metrics):
    # Check 1: -0.0 is a zero already, 2^-10 ties to even and is flushed, 1.01 * 2^-10 is not.
    x = torch.tensor([[0, -0.0, 2**-10, 1.01 * 2**-10, 1]])
    row = metrics(x, quantize(x, E4M3FN, scale=1.0))
    assert row["underflow_pct"] == 20
    assert row["lost_energy_pct"] == pytest.approx(100 * 2**-20, rel=1e-5)
    assert row["amin"] == 2**-10


@both_ways
def test_saturation_counts_what_lies_beyond_even_if_it_rounds_back(metrics):
    # Check 2: 449 rounds to 448 and counts all the same.
    x = torch.tensor([[448.0, 449, -500, 1]])
    assert metrics(x, quantize(x, E4M3FN, scale=1.0))["saturation_pct"] == 50


@both_ways
def test_the_largest_number_of_a_current_scale_does_not_saturate(metrics):
    amaxes = torch.linspace(1, 4, 500)
    for amax in amaxes[(amaxes * (448 / amaxes)) > 448][:20]:
        x = torch.stack([amax, -amax, amax / 3])[None]
        assert metrics(x, quantize(x, E4M3FN))["saturation_pct"] == 0


@both_ways
def test_dynamic_range_from_the_largest_and_smallest(metrics):
    # Check 9: log2(1000) - log2(1e-10) = 43.18507
    x = torch.full((1024, 1024), 1e-10)
    x[3], x[10:13] = 1000, 50
    row = metrics(x, quantize(x, E4M3FN))
    assert math.log2(row["amax"]) - math.log2(row["amin"]) == pytest.approx(43.18507, abs=1e-5)


@both_ways
def test_healthy_casts_have_the_known_sqnr(metrics):
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    assert metrics(x, quantize(x, E4M3FN))["sqnr_db"] == pytest.approx(31.5, abs=0.2)
    assert metrics(x, quantize(x, E5M2))["sqnr_db"] == pytest.approx(25.6, abs=0.2)
    assert metrics(x, quantize(x, E4M3FN, PerRow()))["kurtosis"] == pytest.approx(3, abs=0.03)


@both_ways
def test_gain_sees_a_doubled_scale_and_cosine_does_not(metrics):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    q = quantize(x, E4M3FN)
    row = metrics(x, QTensor(q.codes, q.scale * 2, q.fmt, q.granularity))
    assert row["cosine"] > 0.999
    assert row["gain"] == pytest.approx(2, abs=0.01)


@both_ways
def test_gain_sees_a_byte_read_as_the_twin_format(metrics):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    q = quantize(x, E4M3FN)
    misread = QTensor(q.codes.view(torch.float8_e4m3fnuz), q.scale, E4M3FNUZ, q.granularity)
    row = metrics(x, misread)
    assert row["cosine"] > 0.999
    assert row["gain"] == pytest.approx(0.5, abs=0.01)


@both_ways
def test_columns_see_an_outlier_channel_that_the_whole_does_not(metrics):
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 2e5
    row = metrics(x, quantize(x, E4M3FN))
    assert row["sqnr_db"] > 30
    assert row["p5_col_sqnr_db"] < 3
    assert row["p5_row_sqnr_db"] > 20  # rows do not: each holds the channel
    assert metrics(x, quantize(x, E4M3FN, PerColumn()))["p5_col_sqnr_db"] > 30


@both_ways
def test_rows_see_an_outlier_token_that_the_whole_does_not(metrics):
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    x[7] *= 2e5
    row = metrics(x, quantize(x, E4M3FN))
    assert row["sqnr_db"] > 30
    assert row["p5_row_sqnr_db"] < 3
    assert metrics(x, quantize(x, E4M3FN, PerRow()))["p5_row_sqnr_db"] > 30


@both_ways
def test_much_underflow_may_lose_little_energy(metrics):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 256, generator=generator)
    x[torch.rand(256, 256, generator=generator) < 0.54] *= 1e-7
    row = metrics(x, quantize(x, E4M3FN))
    assert 50 < row["underflow_pct"] < 58
    assert row["lost_energy_pct"] < 1e-4
    assert row["sqnr_db"] > 30


@both_ways
def test_everything_flushed_has_gain_zero_and_no_cosine(metrics):
    x = torch.full((4, 8), 1e-6)
    row = metrics(x, quantize(x, E4M3FN, scale=1.0))
    assert (row["underflow_pct"], row["lost_energy_pct"], row["gain"], row["sqnr_db"]) == (100, 100, 0, 0)
    assert math.isnan(row["cosine"])


@both_ways
def test_a_perfect_copy(metrics):
    x = torch.tensor([[1.0, 2, 3, 4], [8, -16, 0.5, 0]])
    row = metrics(x, quantize(x, E4M3FN, scale=2.0))
    assert row["sqnr_db"] == row["p5_row_sqnr_db"] == row["p5_col_sqnr_db"] == math.inf
    assert row["gain"] == pytest.approx(1, abs=1e-6)
    assert row["cosine"] == pytest.approx(1, abs=1e-6)
    assert row["mse"] == 0


def test_measure_gives_every_frozen_column_as_plain_python():
    x = torch.randn(8, 32)
    row = measure(x, quantize(x, E4M3FN), amax_ratio=1.5)
    assert tuple(row) == OPERAND_COLUMNS
    kinds = {"float": float, "count": int, "histogram": list}
    assert {name: type(value) for name, value in row.items()} == {n: kinds[CATALOG[n].kind] for n in row}
    assert all(type(count) is int for name in HISTOGRAMS for count in row[name])
    assert row["amax_ratio"] == 1.5


@pytest.mark.parametrize("shape", [(32,), (2, 3, 32), (1, 1, 1, 32)])
@both_ways
def test_leading_dimensions_are_rows(metrics, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = x.reshape(-1, 32)
    assert repr(metrics(x, quantize(x, E4M3FN))) == repr(metrics(rows, quantize(rows, E4M3FN)))  # NaN equals NaN


@both_ways
def test_an_empty_tensor_has_no_metrics(metrics):
    row = metrics(torch.zeros(0, 32), quantize(torch.zeros(0, 32), E4M3FN))
    assert row["numel"] == 0
    assert math.isnan(row["sqnr_db"])


@both_ways
def test_another_tensors_codes_are_refused(metrics):
    q = quantize(torch.randn(8, 32), E4M3FN, PerTensor())
    with pytest.raises(ShapeError, match=r"the tensor is \[4, 2, 16\], as rows \[8, 16\], but its codes are \[8, 32\]"):
        metrics(torch.randn(4, 2, 16), q)


def test_what_no_float32_tells_from_zero_beside_its_block_is_in_no_bin_of_ranges_as_its_formula_says():
    x = torch.full((2, 8), 1e-39)  # 2^129 below
    x[:, 0], x[:, 1] = 1.0, 1e-38
    row = measure(x, quantize(x, E4M3FN))
    assert (row["block_range_histogram"][0], row["block_range_histogram"][-1]) == (2, 2)
    assert sum(row["block_range_histogram"]) == 4
    assert "without zeros and what lies 2^128 below" in by_name("block_range_histogram").formula


def test_a_tensor_in_place_of_its_codes_is_refused():
    x = torch.randn(8, 32)
    with pytest.raises(UsageError, match=r"what quantize made of it \(a QTensor\), found a Tensor and a Tensor\."):
        measure(x, x)
    with pytest.raises(UsageError, match=r"found a ndarray and a QTensor\."):
        measure(x.numpy(), quantize(x, E4M3FN))


def test_a_tensor_that_was_measured_can_be_resized():
    """torch lets nobody resize memory again that numpy has seen."""
    x = torch.ones(4, 32)
    for granularity in (PerTensor(), Block(1, 32)):
        q = quantize(x, E4M3FN, granularity)
        measure(x, q)
        scale_values(q.scale)  # what a collector asks, of a scale that may be the program's
        scale_values(q.scale.double())
        assert q.scale.untyped_storage().resizable()
        assert q.codes.untyped_storage().resizable()
    assert x.resize_(8, 32)[:4].sum() == 128
