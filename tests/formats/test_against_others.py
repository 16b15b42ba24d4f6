"""ml_dtypes and torch agree with the oracle, except where formats.codec says that they differ."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge.formats import E2M1, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Format, codec_array

from .telling import telling_values

SUFFIX = {"E8M0": "float8_e8m0fnu", "E2M1": "float4_e2m1fn"}
EIGHT_BIT = [E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ]


def dtype_name(fmt: Format) -> str:
    return SUFFIX.get(fmt.name, "float8_" + fmt.name.lower())


def by_ml_dtypes(values: np.ndarray, fmt: Format) -> np.ndarray:
    with np.errstate(all="ignore"):
        return values.astype(getattr(ml_dtypes, dtype_name(fmt))).view(np.uint8)


def by_torch(values: np.ndarray, fmt: Format) -> np.ndarray:
    return torch.from_numpy(values).to(getattr(torch, dtype_name(fmt))).view(torch.uint8).numpy()


def test_decode_agrees_with_both(fmt: Format):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    ours = codec_array.decode(codes, fmt)
    theirs = codes.view(getattr(ml_dtypes, dtype_name(fmt))).astype(np.float64)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[ours == 0]), np.signbit(theirs[ours == 0]))
    if fmt is not E2M1:  # torch has the dtype, packed in pairs, and no casts
        torchs = torch.from_numpy(codes).view(getattr(torch, dtype_name(fmt))).float().numpy()
        np.testing.assert_array_equal(ours, torchs)
        np.testing.assert_array_equal(np.signbit(ours[ours == 0]), np.signbit(torchs[ours == 0]))


@pytest.mark.parametrize("fmt", EIGHT_BIT, ids=lambda fmt: fmt.name)
def test_encode_agrees_with_ml_dtypes_overflowing_to_nonfinite(fmt: Format):
    values = telling_values(fmt)
    ours, theirs = codec_array.encode(values, fmt, "nonfinite"), by_ml_dtypes(values, fmt)
    if fmt is E5M2:  # the one difference: which of the three NaN codes
        nan = np.isnan(values)
        np.testing.assert_array_equal(theirs[nan], ours[nan] - 1)
        ours, theirs = ours[~nan], theirs[~nan]
    np.testing.assert_array_equal(ours, theirs)


def test_encode_agrees_with_torch_saturating_in_e4m3fn_and_not_in_the_others():
    for fmt in EIGHT_BIT:
        values = telling_values(fmt)
        overflow = "saturate" if fmt is E4M3FN else "nonfinite"
        np.testing.assert_array_equal(codec_array.encode(values, fmt, overflow), by_torch(values, fmt))


def test_e2m1_agrees_with_ml_dtypes_but_for_nan():
    values = telling_values(E2M1)
    np.testing.assert_array_equal(codec_array.encode(values, E2M1), by_ml_dtypes(values, E2M1))
    assert by_ml_dtypes(np.float32([np.nan]), E2M1) == [0x8]  # ours raises FormatError


def test_e8m0_agrees_with_both_on_positive_normal_floats():
    values = telling_values(E8M0)
    usual = values[(values >= 2.0**-126) | np.isnan(values)]
    ours = codec_array.encode(usual, E8M0, "nonfinite")
    np.testing.assert_array_equal(ours, by_ml_dtypes(usual, E8M0))
    np.testing.assert_array_equal(ours, by_torch(usual, E8M0))


@pytest.mark.parametrize(
    ("value", "ours", "torchs", "ml"),
    [
        (0.0, 0x00, 0x00, 0xFF),
        (-0.0, 0x00, 0x00, 0xFF),
        (-2.0, 0xFF, 0x80, 0xFF),
        (1.25 * 2.0**-127, 0x00, 0x01, 0x01),  # below the tie at 1.5: the lower power is nearer
        (1.5 * 2.0**-127, 0x01, 0x01, 0x01),
        (2.0**-127, 0x00, 0x00, 0x00),
        (np.inf, 0xFF, 0xFF, 0xFF),
    ],
)
def test_where_e8m0_differs(value, ours, torchs, ml):
    values = np.float32([value])
    assert codec_array.encode(values, E8M0, "nonfinite") == [ours]
    assert by_torch(values, E8M0) == [torchs]
    assert by_ml_dtypes(values, E8M0) == [ml]


@pytest.mark.parametrize(
    ("fmt", "value", "torchs", "ml"),
    [
        (E4M3FN, 465.0, 0x7E, 0x7F),
        (E4M3FN, -np.inf, 0xFE, 0xFF),
        (E5M2, 61440.0, 0x7C, 0x7C),
        (E4M3FNUZ, 248.0, 0x80, 0x80),
        (E5M2FNUZ, np.inf, 0x80, 0x80),
        (E5M2, np.nan, 0x7F, 0x7E),
    ],
)
def test_the_table_of_differences_in_overflow(fmt, value, torchs, ml):
    values = np.float32([value])
    assert by_torch(values, fmt) == [torchs]
    assert by_ml_dtypes(values, fmt) == [ml]
