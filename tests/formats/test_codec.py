from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.errors import FormatError
from narrowgauge.formats import CATALOG, E2M1, E4M3FN, E4M3FNUZ, E5M2, E8M0, Format, codec, codec_array

from .telling import magnitudes, telling_values

OVERFLOWS = ("saturate", "nonfinite")


def overflows(fmt: Format) -> tuple[str, ...]:
    return OVERFLOWS if fmt.has_nan else OVERFLOWS[:1]


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Bit for bit, so that -0.0 is not 0.0; any NaN equals any NaN of the same sign."""
    nan = np.isnan(wanted)
    bits = found.view(np.uint64) == wanted.view(np.uint64)
    return bool(np.all(np.where(nan, np.isnan(found) & (np.signbit(found) == np.signbit(wanted)), bits)))


def test_every_code_survives_the_round_trip(fmt: Format):
    for overflow in overflows(fmt):
        for code in range(1 << fmt.bits):
            value = codec.decode(code, fmt)
            if math.isnan(value) or (math.isinf(value) and overflow == "saturate"):
                continue
            assert codec.encode(value, fmt, overflow) == code


def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_nearer(fmt: Format):
    exact = magnitudes(fmt)[:-1]
    for code, (low, high) in enumerate(pairwise(exact)):
        middle = Fraction(low) / 2 + Fraction(high) / 2
        hair = Fraction(1, 10**60)
        # One significant bit has no even: IEEE 754 sends such a tie to the larger magnitude.
        even = code + code % 2 if fmt.mantissa_bits else code + 1
        assert codec.encode(middle, fmt) == even
        assert codec.encode(middle - hair, fmt) == code
        assert codec.encode(middle + hair, fmt) == code + 1


def test_the_fast_twin_is_bit_equal_on_everything_that_tells(fmt: Format):
    values = telling_values(fmt)
    for overflow in overflows(fmt):
        slow = np.array([codec.encode(float(v), fmt, overflow) for v in values])
        fast = codec_array.encode(values, fmt, overflow)
        wrong = np.flatnonzero(slow != fast)
        assert wrong.size == 0, [(values[i], hex(slow[i]), hex(fast[i])) for i in wrong[:5]]
        rounded = np.array([codec.round_to(float(v), fmt, overflow) for v in values])
        assert same(codec_array.round_to(values, fmt, overflow), rounded)
    codes = np.arange(1 << fmt.bits)
    assert same(codec_array.decode(codes, fmt), np.array([codec.decode(int(c), fmt) for c in codes]))


@given(value=st.floats(allow_nan=True, allow_infinity=True), name=st.sampled_from(sorted(CATALOG)))
def test_the_fast_twin_is_bit_equal_on_any_float64(value: float, name: str):
    fmt = CATALOG[name]
    for overflow in overflows(fmt):
        if math.isnan(value) and not fmt.has_nan:
            continue
        slow = codec.encode(value, fmt, overflow)
        assert int(codec_array.encode(value, fmt, overflow)) == slow


@given(value=st.fractions(), name=st.sampled_from(sorted(set(CATALOG) - {"E8M0"})))
def test_no_other_value_is_nearer(value: Fraction, name: str):
    fmt = CATALOG[name]
    rounded = Fraction(codec.round_to(value, fmt))
    exact = [Fraction(m) * sign for m in magnitudes(fmt)[:-1] for sign in (1, -1)]
    assert abs(rounded - value) == min(abs(e - value) for e in exact)


@given(a=st.floats(allow_nan=False), b=st.floats(allow_nan=False), name=st.sampled_from(sorted(CATALOG)))
def test_rounding_is_monotone(a: float, b: float, name: str):
    fmt = CATALOG[name]
    low, high = sorted((a, b)) if fmt.signed else sorted((abs(a), abs(b)))
    assert codec.round_to(low, fmt) <= codec.round_to(high, fmt)


@pytest.mark.parametrize(
    ("fmt", "value", "saturate", "nonfinite"),
    [
        (E4M3FN, 464.0, 0x7E, 0x7E),  # ties to 448, whose code is even
        (E4M3FN, math.nextafter(464, 1e9), 0x7E, 0x7F),
        (E4M3FN, -math.inf, 0xFE, 0xFF),
        (E5M2, 61440.0, 0x7B, 0x7C),  # ties to 65536, which is beyond
        (E5M2, math.nextafter(61440, 0), 0x7B, 0x7B),
        (E5M2, -math.inf, 0xFB, 0xFC),
        (E4M3FNUZ, 248.0, 0x7F, 0x80),
        (E4M3FNUZ, -1e9, 0xFF, 0x80),
        (E8M0, 1.5 * 2.0**127, 0xFE, 0xFF),
        (E8M0, math.inf, 0xFE, 0xFF),
        (E4M3FN, 10**400, 0x7E, 0x7F),
        (E4M3FN, Fraction(-(10**400)), 0xFE, 0xFF),
    ],
)
def test_overflow_is_what_was_asked_for(fmt, value, saturate, nonfinite):
    assert codec.encode(value, fmt, "saturate") == saturate
    assert codec.encode(value, fmt, "nonfinite") == nonfinite


@pytest.mark.parametrize(
    ("fmt", "value", "code"),
    [
        (E4M3FN, -0.0, 0x80),
        (E4M3FN, -1e-30, 0x80),
        (E4M3FNUZ, -0.0, 0x00),  # 0x80 would be NaN
        (E4M3FNUZ, -1e-30, 0x00),
        (E8M0, 0.0, 0x00),
        (E8M0, -0.0, 0x00),
        (E8M0, 5e-324, 0x00),
        (E8M0, -1.0, 0xFF),
        (E8M0, math.nan, 0xFF),
        (E5M2, math.nan, 0x7F),
        (E5M2, -math.nan, 0xFF),
        (E2M1, -0.0, 0x8),
        (E2M1, 5.0, 0x6),
        (E2M1, -math.inf, 0xF),
    ],
)
def test_zeros_nans_and_the_ends(fmt, value, code):
    assert codec.encode(value, fmt) == code
    assert int(codec_array.encode(value, fmt)) == code


@pytest.mark.parametrize("module", [codec, codec_array])
def test_what_cannot_be_encoded_is_said(module):
    with pytest.raises(FormatError, match=r"overflow is 'wrap'; expected 'saturate' or 'nonfinite'\."):
        module.encode(1.0, E4M3FN, "wrap")
    with pytest.raises(FormatError, match=r"E2M1 has neither Inf nor NaN to overflow to; use overflow='sat"):
        module.encode(1.0, E2M1, "nonfinite")
    with pytest.raises(FormatError, match=r"E2M1 has no code for NaN; remove or replace NaN"):
        module.encode(math.nan, E2M1)
    with pytest.raises(FormatError, match=r"E2M1 has codes 0 to 15, found 16\."):
        module.decode(16, E2M1)
    with pytest.raises(FormatError, match=r"E4M3FN has codes 0 to 255, found -1\."):
        module.decode(-1, E4M3FN)


def test_arrays_keep_their_shape_and_refuse_what_is_not_exact():
    assert codec_array.encode(np.zeros((2, 0, 3)), E4M3FN).shape == (2, 0, 3)
    assert codec_array.decode(np.zeros((2, 1), np.uint8), E5M2).shape == (2, 1)
    assert codec_array.encode([1, 2], E4M3FN).dtype == np.uint8
    with pytest.raises(FormatError, match=r"codes are integers, found float64\."):
        codec_array.decode([1.0], E4M3FN)
    with pytest.raises(FormatError, match=r"values are complex128, more than float64 holds"):
        codec_array.encode([1j], E4M3FN)
