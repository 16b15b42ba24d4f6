"""The oracle: one number at a time, in exact rational arithmetic, slow and obviously right.

    encode(v) = the code whose value is nearest to v; of two equally near, the one with the even code
    e    = max(floor(log2 |v|), emin)          the binade, held at emin for subnormals
    n    = round_half_even(|v| / 2^(e - m))    how many units in the last place
    code = (e - emin) · 2^m + n                a carry out of n walks into the next binade by itself

E8M0 has no mantissa bit to be even: a tie goes to the larger power of two (IEEE 754-2019, section 4.3.1).

**Overflow is always a choice.** What counts is the rounded value, so 464 still fits E4M3FN (it ties to 448):

    "saturate"    beyond max, Inf included, becomes ±max
    "nonfinite"   beyond max becomes ±Inf, or NaN in a format without Inf

NaN stays NaN under both. FINITE formats have no NaN: encoding one there is an error, never a silent number.

How others differ (pinned in tests/formats/test_against_others.py):

                                ours                      torch 2.13, CPU         ml_dtypes 0.6
    beyond max, E4M3FN          as asked                  ±448                    NaN
    beyond max, E5M2            as asked                  ±Inf                    ±Inf
    beyond max, FNUZ            as asked                  NaN                     NaN
    NaN in E5M2                 0x7F                      0x7F                    0x7E
    beyond max, E8M0            as asked                  NaN                     NaN
    0 and -0.0 in E8M0          0x00 (2^-127)             0x00                    NaN
    negative in E8M0            NaN                       encodes the magnitude   NaN
    2^-127 < v < 1.5 · 2^-127   0x00, the nearer          0x01                    0x01
    NaN in E2M1                 FormatError               no cast                 0x8 (-0)
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, TypeAlias

from narrowgauge.errors import FormatError
from narrowgauge.formats.spec import Format

Overflow: TypeAlias = Literal["saturate", "nonfinite"]


def encode(value: float | Fraction, fmt: Format, overflow: Overflow = "saturate") -> int:
    """Return the code of the number nearest to `value` (int, float or Fraction), ties to even.

    Raises FormatError for a NaN where the format has none, and for an `overflow` it cannot express.
    """
    check_overflow(overflow, fmt)
    if isinstance(value, float) and math.isnan(value):
        return _nan(fmt, negative=math.copysign(1.0, value) < 0)
    # copysign sees the sign of -0.0; integers and fractions may be too large for it and have no -0.
    negative = math.copysign(1.0, value) < 0 if isinstance(value, float) else value < 0
    if not fmt.signed and value < 0:
        return _nan(fmt, negative=False)
    sign = fmt.sign_mask if negative else 0
    if isinstance(value, float) and math.isinf(value):
        magnitude_code = fmt.max_code + 1
    else:
        magnitude_code = _magnitude_code(abs(Fraction(value)), fmt)
    if magnitude_code > fmt.max_code:
        if overflow == "saturate":
            return sign | fmt.max_code
        return _nan(fmt, negative) if fmt.inf_code is None else sign | fmt.inf_code
    if magnitude_code == 0 and not fmt.has_negative_zero:
        return 0
    return sign | magnitude_code


def decode(code: int, fmt: Format) -> float:
    """Return the value of `code`; exact, since every value of every format is a float."""
    if not 0 <= code < 1 << fmt.bits:
        raise FormatError(f"{fmt.name} has codes 0 to {(1 << fmt.bits) - 1}, found {code}.")
    magnitude = code & ~fmt.sign_mask
    sign = -1.0 if code & fmt.sign_mask else 1.0
    if fmt.inf_code is not None and magnitude == fmt.inf_code:
        return sign * math.inf
    if magnitude > fmt.max_code or (code == fmt.sign_mask and code == fmt.nan_code):
        return math.copysign(math.nan, sign)
    exponent_field, fraction = divmod(magnitude, 1 << fmt.mantissa_bits)
    normal = exponent_field > 0 or not fmt.has_zero
    significand = fraction + (1 << fmt.mantissa_bits if normal else 0)
    exponent = exponent_field - fmt.bias if normal else fmt.emin
    return sign * math.ldexp(significand, exponent - fmt.mantissa_bits)


def round_to(value: float | Fraction, fmt: Format, overflow: Overflow = "saturate") -> float:
    """Return `value` rounded to the format: decode(encode(value))."""
    return decode(encode(value, fmt, overflow), fmt)


def check_overflow(overflow: str, fmt: Format) -> None:
    """Raise FormatError unless `overflow` is a word this format can honour."""
    if overflow not in ("saturate", "nonfinite"):
        raise FormatError(f"overflow is {overflow!r}; expected 'saturate' or 'nonfinite'.")
    if overflow == "nonfinite" and not fmt.has_nan:
        raise FormatError(f"{fmt.name} has neither Inf nor NaN to overflow to; use overflow='saturate'.")


def _nan(fmt: Format, negative: bool) -> int:
    if fmt.nan_code is None:
        raise FormatError(f"{fmt.name} has no code for NaN; remove or replace NaN before encoding.")
    return fmt.nan_code | (fmt.sign_mask if negative else 0)


def _magnitude_code(magnitude: Fraction, fmt: Format) -> int:
    if not fmt.has_zero and magnitude < Fraction(fmt.min_normal):
        return 0  # E8M0: nothing is smaller than code 0
    exponent = max(_floor_log2(magnitude), fmt.emin) if magnitude else fmt.emin
    ulps = round(magnitude / Fraction(2) ** (exponent - fmt.mantissa_bits))  # Python rounds halves to even
    code = ((exponent - fmt.emin) << fmt.mantissa_bits) + ulps
    # Without subnormals the hidden bit is not counted by field 1 but by field 0.
    return code if fmt.has_zero else code - (1 << fmt.mantissa_bits)


def _floor_log2(magnitude: Fraction) -> int:
    guess = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return guess if Fraction(2) ** guess <= magnitude else guess - 1
