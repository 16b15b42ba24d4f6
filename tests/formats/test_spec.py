from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import pytest

from narrowgauge.errors import FormatError
from narrowgauge.formats import CATALOG, E2M1, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Format, by_name, codec


# Typed from the specifications, not from the code.
@pytest.mark.parametrize(
    ("fmt", "bits", "largest", "min_normal", "min_subnormal", "flush_below", "emax"),
    [
        (E4M3FN, 8, 448.0, 2**-6, 2**-9, 2**-10, 8),
        (E5M2, 8, 57344.0, 2**-14, 2**-16, 2**-17, 15),
        (E4M3FNUZ, 8, 240.0, 2**-7, 2**-10, 2**-11, 7),
        (E5M2FNUZ, 8, 57344.0, 2**-15, 2**-17, 2**-18, 15),
        (E8M0, 8, 2.0**127, 2**-127, 2**-127, 0.0, 127),
        (E2M1, 4, 6.0, 1.0, 0.5, 0.25, 2),
    ],
)
def test_derived_ranges_are_those_of_the_specifications(
    fmt, bits, largest, min_normal, min_subnormal, flush_below, emax
):
    assert (fmt.bits, fmt.max, fmt.emax) == (bits, largest, emax)
    assert (fmt.min_normal, fmt.min_subnormal, fmt.flush_below) == (min_normal, min_subnormal, flush_below)


def test_derived_ranges_agree_with_ml_dtypes(fmt: Format):
    suffix = {"E8M0": "8_e8m0fnu", "E2M1": "4_e2m1fn"}.get(fmt.name, "8_" + fmt.name.lower())
    info = ml_dtypes.finfo(getattr(ml_dtypes, "float" + suffix))
    assert float(info.max) == fmt.max
    assert float(info.smallest_normal) == fmt.min_normal
    if fmt.has_zero:
        assert float(info.smallest_subnormal) == fmt.min_subnormal


@pytest.mark.parametrize(
    ("name", "signed", "has_inf", "has_nan", "has_zero", "has_negative_zero"),
    [
        ("E4M3FN", True, False, True, True, True),
        ("E5M2", True, True, True, True, True),
        ("E4M3FNUZ", True, False, True, True, False),
        ("E5M2FNUZ", True, False, True, True, False),
        ("E8M0", False, False, True, False, False),
        ("E2M1", True, False, False, True, True),
    ],
)
def test_specials(name, signed, has_inf, has_nan, has_zero, has_negative_zero):
    fmt = by_name(name)
    found = (fmt.signed, fmt.has_inf, fmt.has_nan, fmt.has_zero, fmt.has_negative_zero)
    assert found == (signed, has_inf, has_nan, has_zero, has_negative_zero)
    values = [codec.decode(code, fmt) for code in range(1 << fmt.bits)]
    assert any(map(math.isinf, values)) == has_inf
    assert any(map(math.isnan, values)) == has_nan
    assert any(v == 0 for v in values) == has_zero
    assert any(v == 0 and math.copysign(1, v) < 0 for v in values) == has_negative_zero


def test_a_format_is_frozen_hashable_and_equal_by_content():
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3FN.bias = 8
    assert dataclasses.replace(E4M3FN) == E4M3FN
    assert len({*CATALOG.values()}) == 6
    assert repr(E5M2) == "formats.E5M2"


def test_by_name_takes_any_case_and_names_the_nearest():
    assert by_name("e4m3fn") is E4M3FN
    with pytest.raises(FormatError, match=r"no number format is called 'E4M3'; did you mean 'E4M3FN'\?"):
        by_name("E4M3")
