from __future__ import annotations

import dataclasses

import pytest
import torch

from narrowgauge.compute.quant import (
    Block,
    BLOCK_1x32,
    BLOCK_128x128,
    PerColumn,
    PerRow,
    PerTensor,
    QTensor,
    quantize,
)
from narrowgauge.errors import FormatError, ShapeError
from narrowgauge.formats import E4M3FN, E5M2, E8M0

WHOLE = PerTensor()
CODES = torch.zeros(4, 64, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("granularity", "turned"),
    [
        (PerTensor(), PerTensor()),
        (PerRow(), PerColumn()),
        (PerColumn(), PerRow()),
        (BLOCK_1x32, Block(32, 1)),
        (BLOCK_128x128, BLOCK_128x128),
        (Block(3, 5), Block(5, 3)),
    ],
    ids=str,
)
def test_the_transpose_is_a_view_that_dequantizes_to_the_transpose(granularity, turned):
    q = quantize(torch.randn(37, 70), E4M3FN, granularity)
    assert q.T.granularity == turned
    assert q.T.shape == (70, 37)
    assert q.T.codes.data_ptr() == q.codes.data_ptr()
    assert torch.equal(q.T.dequantize(), q.dequantize().t())
    again = q.T.T
    assert again.granularity == granularity
    assert torch.equal(again.scale, q.scale)


def test_dequantize_multiplies_in_float32_and_rounds_once():
    q = QTensor(torch.full((1, 1), 1.125).to(torch.float8_e4m3fn), torch.tensor(1 / 3), E4M3FN, PerTensor())
    assert q.dequantize() == 1.125 * torch.tensor(1 / 3)
    assert q.dequantize(torch.bfloat16) == (1.125 * torch.tensor(1 / 3)).bfloat16()
    assert q.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_inv_scale_is_the_reciprocal_finite_even_for_the_smallest_scale_and_1_for_poison():
    codes = torch.zeros(3, 1, dtype=torch.float8_e5m2)
    scale = torch.tensor([[4.0], [torch.nan], [2.0**-128]])
    found = QTensor(codes, scale, E5M2, PerRow()).inv_scale
    assert found.flatten().tolist() == [0.25, 1.0, torch.finfo(torch.float32).max]


def test_it_is_frozen_and_compares_by_identity():
    q = quantize(torch.ones(2, 2), E4M3FN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.scale = torch.ones(())
    assert q == q
    assert q != quantize(torch.ones(2, 2), E4M3FN)


@pytest.mark.parametrize(
    ("codes", "shape", "dtype", "fmt", "granularity", "error", "message"),
    [
        (
            CODES,
            (),
            torch.float32,
            E5M2,
            PerTensor(),
            FormatError,
            r"codes of E5M2 are torch\.float8_e5m2, found ",
        ),
        (CODES, (), torch.float32, E8M0, WHOLE, FormatError, r"cannot be quantized to E8M0"),
        (
            CODES,
            (),
            torch.float64,
            E4M3FN,
            PerTensor(),
            FormatError,
            r"found torch\.float64; use \.float\(\)\.",
        ),
        (CODES[0], (), torch.float32, E4M3FN, WHOLE, ShapeError, r"found \[64\]; flatten them\."),
        (
            CODES,
            (1,),
            torch.float32,
            E4M3FN,
            PerTensor(),
            ShapeError,
            r"needs a scale of shape \[\], found \[1\]",
        ),
        (
            CODES,
            (1, 4),
            torch.float32,
            E4M3FN,
            PerRow(),
            ShapeError,
            r"PerRow\(\) of codes \[4, 64\] needs a ",
        ),
        (
            CODES,
            (4, 3),
            torch.float32,
            E4M3FN,
            BLOCK_1x32,
            ShapeError,
            r"of shape \[4, 2\], found \[4, 3\]\.",
        ),
    ],
)
def test_invariants_hold_from_construction(codes, shape, dtype, fmt, granularity, error, message):
    with pytest.raises(error, match=message):
        QTensor(codes, torch.ones(shape, dtype=dtype), fmt, granularity)


def test_codes_and_scale_live_on_one_device():
    with pytest.raises(ShapeError, match=r"codes are on cpu, scale is on meta; move one\."):
        QTensor(CODES, torch.ones((), device="meta"), E4M3FN, PerTensor())
