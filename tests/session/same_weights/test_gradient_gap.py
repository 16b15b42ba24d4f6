from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.session.same_weights.gradient_gap import KEPT, gap


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), noise=st.floats(1e-7, 2.0), size=st.integers(1, 300))
def test_the_numbers_match_float64(seed: int, noise: float, size: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a = [torch.randn(size, 3, generator=g), torch.randn(size, generator=g)]
    b = [x + noise * torch.randn(x.shape, generator=g) for x in a]
    found = gap(["w", "b"], torch.tensor(2.0), torch.tensor(2.1), a, b)
    flat_a = torch.cat([x.flatten() for x in a]).double()
    flat_b = torch.cat([x.flatten() for x in b]).double()
    assert found.loss_gap_pct == pytest.approx(5.0, rel=1e-5)
    cosine = float(torch.dot(flat_a, flat_b) / flat_a.norm() / flat_b.norm())
    assert found.cosine == pytest.approx(cosine, abs=1e-6)
    assert found.norm_ratio == pytest.approx(float(flat_b.norm() / flat_a.norm()), rel=1e-9)
    assert found.relative == pytest.approx(float((flat_b - flat_a).norm() / flat_a.norm()), rel=1e-4)


def test_a_missing_gradient_is_zero() -> None:
    found = gap(
        ["a", "b", "c"], torch.tensor(1.0), torch.tensor(1.0), [torch.ones(4), None, None], [None, None, torch.ones(2)]
    )
    assert found.cosine == pytest.approx(0.0, abs=1e-12)
    assert [layer[0] for layer in found.layers] == ["c", "a"]
    assert found.layers[0][2] == math.inf


def test_what_is_not_finite_reads_as_the_worst_there_is() -> None:
    bad = torch.tensor([1.0, math.nan])
    found = gap(["w"], torch.tensor(1.0), torch.tensor(math.nan), [torch.ones(2)], [bad])
    assert (found.loss_gap_pct, found.cosine, found.norm_ratio) == (math.inf, 0.0, math.inf)
    assert found.layers == (("w", 0.0, math.inf),)


def test_only_the_worst_layers_are_kept() -> None:
    n = KEPT + 5
    a = [torch.ones(2) for _ in range(n)]
    b = [torch.ones(2) * (1 + i / 100) for i in range(n)]
    found = gap([f"w{i}" for i in range(n)], torch.tensor(1.0), torch.tensor(1.0), a, b)
    assert [layer[0] for layer in found.layers] == [f"w{i}" for i in range(n - 1, n - 1 - KEPT, -1)]


def test_a_negative_loss_that_rises_is_worse() -> None:
    assert gap([], torch.tensor(-2.0), torch.tensor(-1.9), [], []).loss_gap_pct == pytest.approx(5.0, rel=1e-5)


def test_the_scale_of_a_scaler_is_taken_out() -> None:
    found = gap([], torch.tensor(512.0), torch.tensor(518.0), [], [], torch.tensor(256.0))
    assert (found.loss, found.loss_gap_pct) == (2.0, pytest.approx(100 * 6 / 512))
