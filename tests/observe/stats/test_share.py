"""Of a large tensor on the CPU some rows are compared with their codes: which ones, what of, and how sure that is."""

import importlib
import math

import numpy as np
import pytest
import torch

from narrowgauge.compute.quant import Block, PerColumn, PerRow, PerTensor, QTensor, quantize
from narrowgauge.compute.quant.scaling import CURRENT
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN
from narrowgauge.metrics import MOMENTS, finalize, merge
from narrowgauge.observe.stats import host, measure, moments
from narrowgauge.observe.stats.moments import shares, tallies_of

ERRORS = ("mse", "sqnr_db", "cosine", "gain", "lost_energy_pct", "p5_row_sqnr_db", "p5_col_sqnr_db")
EVERY_ROW = (
    *("numel", "amax", "amin", "mean", "std", "l2", "nan_count", "inf_count", "underflow_pct", "saturation_pct"),
    *("scale_min", "scale_max", "scale_std"),
)
GRANULARITIES = [PerTensor(), PerRow(), PerColumn(), Block(1, 128), Block(128, 128)]


def wild(M, K, seed=0):
    """Rows, columns and elements of very different size, so that much is flushed and no row says what another does."""
    g = torch.Generator().manual_seed(seed)
    rows, columns, elements = (torch.randn(shape, generator=g) for shape in ((M, 1), (1, K), (M, K)))
    return torch.randn(M, K, generator=g) * torch.exp(2 * rows + columns + 3 * elements)


def rows_of(x, q, first, every):
    """Some rows and what became of them, with the scale of each element as its own granule's."""
    scale = q.granularity.expand(q.scale, q.shape)[first::every].contiguous()
    return x[first::every], QTensor(q.codes[first::every].contiguous(), scale, q.fmt, Block(1, 1))


def test_the_share_is_the_stated_one():
    assert shares(255, 4096, 5)[1] == (0, 1)  # fewer than 256 rows
    assert shares(512, 63, 5)[1] == (0, 1)  # fewer than 2^15 elements
    assert shares(512, 64, 5)[1] == (2, 3)
    assert shares(512, 512, 5)[1] == (5, 7)  # a prime
    assert shares(1 << 16, 1024, 37)[1] == (6, 31)
    assert shares(1 << 16, 1024, 37)[0] == (37, 32749)
    for M, K in ((256, 128), (300, 1000), (1024, 1024), (4096, 16), (100_000, 7)):
        taken = [range(*shares(M, K, turn)[1][:1], M, shares(M, K, turn)[1][1]) for turn in range(32)]
        assert all(len(rows) >= 64 and len(rows) * K >= 1 << 13 for rows in taken)
        assert {m for rows in taken for m in rows} == set(range(M))  # no row is left out for ever


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_errors_are_those_of_the_stated_rows_and_all_else_is_exact(granularity, way):
    x = wild(600, 256)
    q = quantize(x, E4M3FN, granularity)
    whole = measure(x, q)
    for turn in (0, 3, 6):
        first, every = shares(*x.shape, turn)[1]
        assert every == 7
        found = finalize(moments(x, q, offset=turn)[None].numpy())
        shared = measure(*rows_of(x, q, first, every))
        for names, want in ((ERRORS, shared), (EVERY_ROW, whole)):
            for name in names:
                close = {"abs": 0.01} if name.endswith("_db") else {"rel": 1e-4}
                assert found[name][0] == pytest.approx(want[name], **close), (name, turn)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_both_ways_take_the_same_rows_also_in_runs(granularity, monkeypatch):
    x = wild(600, 256)
    q = quantize(x, E4M3FN, granularity)
    walked = moments(x, q, offset=5)
    module = importlib.import_module("narrowgauge.observe.stats.moments")
    monkeypatch.setitem(module.RUN, True, 256 * 3)  # shorter than from one compared row to the next
    monkeypatch.setattr(host, "ready", lambda: False)
    assert len(tallies_of(x, q, 5)) > 1
    passed = moments(x, q, offset=5)
    one, other = (finalize(vector[None].numpy()) for vector in (walked, passed))
    for name, value in one.items():
        if name.startswith(("gemm", "amax_ratio")):
            continue
        np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_heads_that_are_rows_are_all_met_in_every_step():
    """Sixteen heads of every token, one of which is a thousand times as loud: its errors show whatever the turn."""
    x = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0))
    x.view(512, 16, 64)[:, 5] *= 1000
    q = quantize(x, E4M3FN)
    want = measure(x, q)
    for turn in (0, 5):
        found = finalize(moments(x, q, offset=turn)[None].numpy())
        assert found["mse"][0] == pytest.approx(want["mse"], rel=0.4)
        assert found["lost_energy_pct"][0] == pytest.approx(want["lost_energy_pct"], rel=0.4)
        assert found["kurtosis"][0] == pytest.approx(want["kurtosis"], rel=0.4)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_a_share_that_holds_nothing_is_not_what_is_compared(granularity, way, monkeypatch):
    """A gradient that one token of each sequence has, which every other stride misses: all rows are compared then."""
    x = torch.zeros(704, 192)
    x.view(64, 11, 192)[:, 6] = wild(64, 192)
    q = quantize(x, E4M3FN, granularity)
    want = measure(x, q)
    monkeypatch.setitem(importlib.import_module("narrowgauge.observe.stats.moments").RUN, True, 192 * 128)
    for turn in (0, 6):
        assert shares(*x.shape, turn)[1] == (turn, 11)
        found = finalize(moments(x, q, offset=turn)[None].numpy())
        for name in (*ERRORS, *EVERY_ROW):
            close = {"abs": 0.01} if name.endswith("_db") else {"rel": 1e-4}
            if turn == 0 or name not in ERRORS:
                assert found[name][0] == pytest.approx(want[name], **close), (name, turn)


def test_what_is_judged_takes_the_rows_that_codes_would():
    x = wild(600, 256)
    rule = Operand(E4M3FN, PerTensor(), CURRENT)
    found = host.judge(x, rule, *shares(600, 256, 2))
    want = host.count(x, quantize(x, E4M3FN), *shares(600, 256, 2))
    np.testing.assert_allclose(found.vector, want.vector, rtol=1e-12)


def test_a_share_weighs_as_its_whole_tensor_where_parts_merge():
    """A large microbatch of which a 32nd is compared beside a small one compared as a whole."""
    large, small = torch.randn(8192, 32), torch.randn(128, 32) * 30
    qs = [quantize(x, E4M3FN, scale=0.25) for x in (large, small)]
    parts = torch.stack([moments(x, q, offset=3) for x, q in zip((large, small), qs, strict=True)]).numpy()
    merged = merge(parts)
    whole = torch.cat((large, small))
    codes = QTensor(torch.cat([q.codes for q in qs]), qs[0].scale, E4M3FN, PerTensor())
    want = measure(whole, codes)
    found = finalize(merged[None])
    assert merged[MOMENTS["xx"]] == pytest.approx(float(whole.double().square().sum()), rel=0.05)
    assert found["sqnr_db"][0] == pytest.approx(want["sqnr_db"], abs=0.1)
    assert found["mse"][0] == pytest.approx(want["mse"], rel=0.03)
    assert found["l2"][0] == pytest.approx(want["l2"], rel=1e-9)
    assert merged[MOMENTS["compared"]] == merged[MOMENTS["n"]] == whole.numel()


@pytest.mark.parametrize(("M", "K"), [(512, 64), (1024, 1024), (300, 4096)])
def test_how_sure_a_share_is(M, K):
    """For numbers without outliers, as docs/watching.md says; a column's share is what is hardest to be sure of."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0))
    q = quantize(x, E4M3FN)
    want = measure(x, q)
    turns = range(shares(M, K, 0)[1][1])
    found = [finalize(moments(x, q, offset=turn)[None].numpy()) for turn in turns]
    off = np.array([row["sqnr_db"][0] - want["sqnr_db"] for row in found])
    sure = 10 / math.log(10) * math.sqrt(4 / max(1 << 13, 64 * K))
    assert np.abs(off).max() < 4 * sure
    for row in found:
        assert row["gain"][0] == pytest.approx(want["gain"], abs=1e-3)
        assert row["p5_row_sqnr_db"][0] == pytest.approx(want["p5_row_sqnr_db"], abs=0.6)
        assert -1.2 < row["p5_col_sqnr_db"][0] - want["p5_col_sqnr_db"] < 0.3


def test_a_code_that_is_no_number_is_seen_in_a_row_that_is_not_compared():
    x = torch.randn(600, 256)
    q = quantize(x, E4M3FN)
    codes = q.codes.clone()
    codes.view(torch.uint8)[1, 0] = 0x7F
    broken = QTensor(codes, q.scale, q.fmt, q.granularity)
    assert host.count(x, broken, (0, 4), (0, 4)) is None
    packed = moments(x, broken, offset=0)
    assert packed[MOMENTS["compared"]] == x.numel() - 1
