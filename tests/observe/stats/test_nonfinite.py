"""Inf and NaN are counted and left out; what they poison does not hide the rest."""

import math

import numpy as np
import pytest
import torch
from tests.observe.stats.test_oracle import assert_agrees

from narrowgauge.compute.quant import (
    CURRENT_POW2,
    BLOCK_1x32,
    BLOCK_1x128,
    BLOCK_128x128,
    PerColumn,
    PerRow,
    PerTensor,
    quantize,
)
from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.metrics import finalize
from narrowgauge.observe.stats import measure, moments

pytestmark = pytest.mark.usefixtures("way")

GRANULARITIES = [PerTensor(), PerRow(), PerColumn(), BLOCK_1x32, BLOCK_1x128, BLOCK_128x128]


def spoiled():
    x = torch.randn(140, 150, generator=torch.Generator().manual_seed(0))
    x[3, 4], x[3, 5], x[70, 9] = math.inf, -math.inf, math.nan
    return x


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_they_are_counted_and_the_rest_is_measured(granularity, fmt):
    x = spoiled()
    q = quantize(x, fmt, granularity)
    found = finalize(moments(x, q)[None].numpy())
    assert_agrees(found, x, q)
    assert (found["nan_count"][0], found["inf_count"][0]) == (1, 2)
    assert found["amax"][0] == x[x.isfinite()].abs().max()
    assert found["numel"][0] == x.numel()
    assert found["exponent_histogram"].sum() == x.numel() - 3


@pytest.mark.parametrize("metrics", [measure, lambda x, q: {k: v[0] for k, v in finalize(moments(x, q)[None]).items()}])
def test_a_poisoned_tensor_has_its_own_moments_and_no_comparison(metrics):
    x = spoiled()
    row = metrics(x, quantize(x, E4M3FN, PerTensor()))
    assert row["std"] == pytest.approx(1, abs=0.02)
    for name in ("underflow_pct", "saturation_pct", "sqnr_db", "gain", "p5_row_sqnr_db", "scale_min", "scale_std"):
        assert math.isnan(row[name]), name


def test_poisoned_rows_leave_the_others_comparable():
    x = spoiled()
    row = measure(x, quantize(x, E4M3FN, PerRow()))
    assert row["sqnr_db"] == pytest.approx(31.5, abs=0.3)
    assert row["underflow_pct"] == 0
    assert row["scale_max"] > row["scale_min"] > 0


def test_nothing_finite_at_all():
    x = torch.full((4, 8), math.nan)
    found = finalize(moments(x, quantize(x, E4M3FN))[None].numpy())
    assert found["nan_count"][0] == 32
    for name in ("amax", "amin", "mean", "std", "l2", "sqnr_db", "kurtosis"):
        assert np.isnan(found[name][0]), name


def test_codes_that_stand_for_more_than_float32_has_are_not_compared():
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)) * 2.0**120
    x[3, 4] = torch.finfo(torch.float32).max  # 255.99 times the power of two below it: rounded up, that is 2^128
    q = quantize(x, E4M3FN, BLOCK_1x128, scaling=CURRENT_POW2)
    assert q.dequantize()[3, 4] == math.inf
    found = finalize(moments(x, q)[None].numpy())
    assert_agrees(found, x, q)
    assert found["sqnr_db"][0] == pytest.approx(31.5, abs=0.5)
