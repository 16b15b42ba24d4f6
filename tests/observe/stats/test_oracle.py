"""The passes on the device give what float64 gives, for every format, granularity and size of number."""

import importlib
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.compute.quant import (
    Block,
    BLOCK_1x32,
    BLOCK_1x128,
    BLOCK_128x128,
    PerColumn,
    PerRow,
    PerTensor,
    QTensor,
    quantize,
)
from narrowgauge.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ
from narrowgauge.metrics import MOMENTS, OPERAND_COLUMNS, finalize
from narrowgauge.observe.stats import host, host_ready, measure, moments
from narrowgauge.observe.stats.packing import Packer
from narrowgauge.observe.stats.tally import tally

FORMATS = [E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ]
GRANULARITIES = [PerTensor(), PerRow(), PerColumn(), BLOCK_1x128, BLOCK_128x128, BLOCK_1x32, Block(7, 5)]
EXACT = ("numel", "amax", "amin", "nan_count", "inf_count", "underflow_pct", "saturation_pct")


def finalized(tally):
    packer = Packer()
    packer.add("", [tally])
    return finalize(packer.pack()[1].numpy())


def assert_agrees(found, x, q, rel=2e-5):
    """Every column of `found` against the float64 oracle; what cancels is compared to the size of its terms."""
    want = measure(x, q)
    size = want["l2"] / max(1, want["numel"]) ** 0.5 if np.isfinite(want["l2"]) else 0.0
    for name in OPERAND_COLUMNS:
        value, expected = np.asarray(found[name][0], float), np.asarray(want[name], float)
        if name in EXACT:
            assert value == pytest.approx(expected, rel=1e-12, nan_ok=True), name
        elif name in ("sqnr_db", "p5_row_sqnr_db", "p5_col_sqnr_db"):
            # Above 120 dB the error is that of float32 itself.
            if not (value > 120 and expected > 120):
                assert value == pytest.approx(expected, abs=0.02 if name == "sqnr_db" else 0.5, nan_ok=True), name
        elif name == "mean":
            assert value == pytest.approx(expected, rel=rel, abs=1e-6 * size, nan_ok=True), name
        elif name == "mse":
            assert value == pytest.approx(expected, rel=2e-4, abs=1e-12 * size**2, nan_ok=True), name
        elif name.endswith("histogram"):
            assert (value == expected).all(), name
        else:
            assert value == pytest.approx(expected, rel=rel, abs=1e-12 * size, nan_ok=True), name


def hard(name):
    """Tensors that defeat careless float32 sums."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(150, 133, generator=g)
    match name:
        case "normal":
            return x
        case "tiny gradients":
            return x * 1e-12
        case "tinier than float32's normal numbers":
            return x * 1e-39
        case "huge":
            return x * 1e30
        case "mean far from zero":
            return 1000 + x
        case "nearly constant":
            return torch.full_like(x, 3.3) + x * 1e-5
        case "one huge outlier":
            x[17, 5] = 1e30
            return x
        case "sparse":
            return torch.where(x > 1, x, 0.0)
        case "zeros":
            return torch.zeros_like(x)
        case "bfloat16":
            return x.bfloat16()
        case "sparse bfloat16":
            return torch.where(x > 1, x, 0.0).bfloat16()
        case "float16":
            return x.half()
        case "transposed":
            return torch.randn(133, 150, generator=g).T
        case "one row":
            return x[:1]
        case "one column":
            return x[:, :1]


HARD = [
    "normal",
    "tiny gradients",
    "tinier than float32's normal numbers",
    "huge",
    "mean far from zero",
    "nearly constant",
    "one huge outlier",
    "sparse",
    "zeros",
    "bfloat16",
    "sparse bfloat16",
    "float16",
    "transposed",
    "one row",
    "one column",
]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_and_granularity(fmt, granularity):
    x = hard("normal")
    q = quantize(x, fmt, granularity)
    assert_agrees(finalized(host.count(x, q, (0, 1), (0, 1))), x, q, rel=1e-9)
    assert_agrees(finalized(tally(x, q)), x, q)


@pytest.mark.parametrize("scale", [None, 1.0, 1e-3])
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), BLOCK_1x128], ids=str)
@pytest.mark.parametrize("name", HARD)
def test_hard_numbers(name, granularity, scale):
    x = hard(name)
    q = quantize(x, E4M3FN, granularity, scale=scale)
    assert_agrees(finalize(moments(x, q)[None].numpy()), x, q)
    assert_agrees(finalized(tally(x, q)), x, q)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 300),
    st.sampled_from(FORMATS),
    st.sampled_from(GRANULARITIES),
    st.floats(-100, 100),
    st.floats(-6, 6),
    st.integers(0, 2**31),
)
def test_any_shape_size_and_spread(M, K, fmt, granularity, exponent, spread, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=g) * torch.exp(spread * torch.randn(M, K, generator=g)) * 2.0**exponent
    q = quantize(x, fmt, granularity)
    assert_agrees(finalize(moments(x, q)[None].numpy()), x, q)


def test_codes_of_another_tensor_are_judged_as_they_are():
    """A stale copy: d may be far larger than x, zero where x is not, and the other way round."""
    g = torch.Generator().manual_seed(0)
    x, other = torch.randn(64, 64, generator=g) * 1e-8, torch.randn(64, 64, generator=g)
    other[other > 0] = 0
    q = quantize(other, E4M3FN)
    assert_agrees(finalize(moments(x, q)[None].numpy()), x, q)
    assert_agrees(finalized(tally(x, q)), x, q)


def test_codes_that_are_a_transposed_view():
    x = hard("normal")
    q = quantize(x.T.contiguous(), E4M3FN, PerColumn()).T
    assert_agrees(finalize(moments(x, q)[None].numpy()), x, q)


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerColumn(), Block(3, 128), BLOCK_128x128], ids=str)
def test_a_large_tensor_is_looked_at_in_runs(granularity, monkeypatch):
    module = importlib.import_module("narrowgauge.observe.stats.moments")  # the function hides its module
    monkeypatch.setitem(module.RUN, True, 133 * 20)
    x = hard("normal")
    q = quantize(x, E4M3FN, granularity)
    found = finalize(moments(x, q)[None].numpy())
    assert_agrees(found, x, q)


def test_a_share_of_the_rows_is_stated_and_turns():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) + torch.arange(256.0)[:, None]
    q = quantize(x, E4M3FN)
    whole = finalize(moments(x, q)[None].numpy())
    seen = np.zeros_like(whole["exponent_histogram"][0])
    for turn in range(31):
        part = finalize(moments(x, q, offset=turn)[None].numpy())
        assert part["exponent_histogram"].sum() == len(range(turn, 256, 31)) * 256  # a 32nd, or a little more
        for name in (*EXACT, "std"):
            assert part[name] == whole[name], name
        seen += part["exponent_histogram"][0]
    assert (seen == whole["exponent_histogram"][0]).all()


def test_looking_changes_nothing_and_needs_no_gradient():
    x = torch.randn(64, 64, requires_grad=True)
    q = quantize(x, E4M3FN)
    before, codes = x.detach().clone(), q.codes.view(torch.uint8).clone()
    packed = moments(x, q)
    assert not packed.requires_grad
    assert torch.equal(x.detach(), before)
    assert torch.equal(q.codes.view(torch.uint8), codes)
    assert packed.shape == (MOMENTS.width,)


def test_the_same_under_autocast():
    x = torch.randn(64, 64)
    q = quantize(x, E4M3FN)
    with torch.autocast("cpu", torch.bfloat16):
        inside = moments(x, q)
    assert torch.equal(inside, moments(x, q))


def test_a_nan_code_under_a_finite_scale_is_left_out_of_the_comparison():
    x = torch.randn(4, 8)
    q = quantize(x, E4M3FN)
    codes = q.codes.clone()
    codes.view(torch.uint8)[0, 0] = 0x7F
    broken = QTensor(codes, q.scale, q.fmt, q.granularity)
    assert_agrees(finalize(moments(x, broken)[None].numpy()), x, broken)
    assert np.isfinite(finalize(moments(x, broken)[None].numpy())["sqnr_db"][0])


def test_a_walk_that_cannot_be_compiled_is_one_warning_and_the_passes(monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError("no such target")

    monkeypatch.setattr(host.kernel(), "operand", broken)
    monkeypatch.setattr(host_ready, "WALK", host_ready.Walk())
    x = hard("normal")
    q = quantize(x, E4M3FN)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not host.prepare()
        found = [finalize(moments(x, q)[None].numpy()) for _ in range(2)]
    assert_agrees(found[1], x, q)
    assert len(caplog.records) == 1
    assert "no such target" in caplog.text
