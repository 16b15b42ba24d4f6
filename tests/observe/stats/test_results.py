"""Results: their own moments and the gemm check."""

import math

import pytest
import torch

from narrowgauge.compute.nn import GemmSample
from narrowgauge.metrics import finalize
from narrowgauge.observe.stats.packing import stack_parts
from narrowgauge.observe.stats.results import result_head

pytestmark = pytest.mark.usefixtures("way")


def finalized(*heads):
    return {name: column[0] for name, column in finalize(stack_parts([list(heads)])).items()}


def check(got, want):
    return finalized(result_head(got, GemmSample(got, want)))


def tensors(name):
    g = torch.Generator().manual_seed(0)
    y = torch.randn(300, 70, generator=g)
    return {
        "plain": y,
        "bfloat16": y.bfloat16(),
        "tiny": y * 1e-20,
        "huge": y * 1e30,
        "far from zero": y + 1000,
        "zeros": y * 0,
        "vector": y[0],
        "transposed": y.T,
        "3d": y.view(3, 100, 70),
        "not finite": torch.where(y > 3, math.inf, torch.where(y < -3, math.nan, y)),
    }[name]


NAMES = ["plain", "bfloat16", "tiny", "huge", "far from zero", "zeros", "vector", "transposed", "3d", "not finite"]


@pytest.mark.parametrize("name", NAMES)
def test_moments_of_a_result(name):
    y = tensors(name)
    row = finalized(result_head(y))
    good = y.double()[y.isfinite()]
    size = good.abs().max().item()
    assert row["numel"] == y.numel()
    assert row["amax"] == size
    assert row["mean"] == pytest.approx(good.mean().item(), rel=1e-6, abs=1e-7 * size)
    assert row["std"] == pytest.approx(good.std(correction=0).item(), rel=1e-5, abs=1e-300)
    assert row["l2"] == pytest.approx(good.norm().item(), rel=1e-5)
    assert (row["nan_count"], row["inf_count"]) == (y.isnan().sum(), y.isinf().sum())


def test_nothing_finite():
    row = finalized(result_head(torch.full((2, 3), math.nan)))
    assert row["nan_count"] == 6
    assert math.isnan(row["amax"])
    assert math.isnan(row["std"])


def test_the_check_is_over_all_the_rows_of_all_microbatches():
    g = torch.Generator().manual_seed(0)
    want = torch.randn(3, 4, 64, generator=g)
    got = 1.1 * want + 0.05 * torch.randn(3, 4, 64, generator=g)
    apart = finalized(*(result_head(a, GemmSample(a, b)) for a, b in zip(got, want, strict=True)))
    w, h = want.double().flatten(), got.double().flatten()
    assert apart["gemm_gain"] == pytest.approx((w @ h / (w @ w)).item())
    assert apart["gemm_cosine"] == pytest.approx((w @ h / w.norm() / h.norm()).item())
    assert apart["gemm_sqnr_db"] == pytest.approx(20 * math.log10((w.norm() / (w - h).norm()).item()))


def test_the_check_sees_a_doubled_scale_and_a_wrong_axis():
    want = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert check(2 * want, want)["gemm_gain"] == pytest.approx(2)
    assert abs(check(want.flip(0), want)["gemm_cosine"]) < 0.5


def test_the_check_leaves_out_what_is_not_finite_and_is_null_without_anything():
    want = torch.tensor([[1.0, 2, 3]])
    got = torch.tensor([[1.0, math.nan, 3]])
    assert check(got, want)["gemm_gain"] == 1
    assert math.isnan(check(got * math.nan, want)["gemm_gain"])
