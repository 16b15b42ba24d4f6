import math

import numpy as np
import pytest

from narrowgauge.metrics import HISTOGRAMS, MOMENTS, RESULT_COLUMNS, finalize


def row(**slots):
    vector = MOMENTS.empty()
    for name, value in slots.items():
        vector[MOMENTS[name]] = value
    return {name: column[0] for name, column in finalize(vector[None]).items()}


def test_without_data_every_metric_is_null_and_every_count_zero():
    for name, value in row().items():
        if name in HISTOGRAMS:
            assert not value.any()
        elif name in ("numel", "nan_count", "inf_count"):
            assert value == 0
        else:
            assert math.isnan(value), name


def test_a_perfect_copy_has_infinite_sqnr_and_no_cosine_beyond_one():
    values = row(compared=2, xx=3.0, xd=3.0000000000000004, dd=3.0, ee=0.0)
    assert values["sqnr_db"] == math.inf
    assert values["mse"] == 0
    assert values["cosine"] == 1.0


def test_all_zeros_have_no_sqnr_cosine_or_gain():
    values = row(numel=4, n=4, scaled=4, compared=4, amax=0.0)
    assert values["amax"] == 0
    assert math.isnan(values["amin"])
    assert values["underflow_pct"] == values["std"] == values["mse"] == 0
    for name in ("sqnr_db", "cosine", "gain", "lost_energy_pct", "kurtosis"):
        assert math.isnan(values[name]), name


def test_a_tensor_of_zeros_only_has_no_scale():
    under = {"scale_n": 1, "scale_mean": 1.0, "scale_min": 1.0, "scale_max": 1.0}
    zeros, others = row(numel=4, n=4, amax=0.0, **under), row(numel=4, n=4, amax=1e-4, **under)
    for name, value in (("scale_min", 1.0), ("scale_max", 1.0), ("scale_std", 0.0)):
        assert math.isnan(zeros[name])
        assert others[name] == value


def test_population_spread_and_plain_kurtosis():
    # 0, 0, 0, 4: mean 1, population variance 3, fourth moment (3 * 1 + 81) / 4 = 21.
    values = row(n=4, mean=1.0, m2=12.0, sample_n=4, sample_m2=12.0, sample_m4=84.0)
    assert values["std"] == pytest.approx(math.sqrt(3))
    assert values["kurtosis"] == pytest.approx(21 / 9)
    assert values["l2"] == pytest.approx(4)


def test_shares_are_of_what_has_a_scale():
    values = row(numel=12, scaled=10, flushed=2, saturated=1, scaled_xx=8.0, flushed_xx=2.0)
    assert (values["underflow_pct"], values["saturation_pct"], values["lost_energy_pct"]) == (20, 10, 25)


def test_the_gemm_check_sees_gain_direction_and_noise():
    values = row(gemm_ww=100.0, gemm_wg=200.0, gemm_gg=400.0, gemm_ee=100.0)
    assert (values["gemm_gain"], values["gemm_cosine"], values["gemm_sqnr_db"]) == (2, 1, 0)


def test_an_infinite_ratio_is_a_fact_and_no_ratio_is_null():
    assert row(amax_ratio=math.inf)["amax_ratio"] == math.inf
    assert math.isnan(row()["amax_ratio"])


def test_results_carry_only_the_head():
    head = MOMENTS.empty(2)[:, : MOMENTS.head_width]
    head[:, MOMENTS["n"]], head[:, MOMENTS["mean"]], head[:, MOMENTS["m2"]] = 4, 1.0, 12.0
    values = finalize(head)
    assert values["l2"].tolist() == [4, 4]
    assert all(len(values[name]) == 2 for name in RESULT_COLUMNS)


@pytest.mark.parametrize("size", [1e-38, 1e38])
def test_the_fourth_power_of_the_smallest_and_largest_floats_is_held(size):
    values = row(sample_n=4, sample_m2=12 * size**2, sample_m4=84 * np.float64(size) ** 4)
    assert values["kurtosis"] == pytest.approx(21 / 9)
