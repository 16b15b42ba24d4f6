"""The oracle's fast twin: the same names and the same bits, on numpy arrays.

    |v| = f · 2^x with 1/2 <= f < 1  (frexp)      e = max(x - 1, emin)      n = rint(|v| · 2^(m - e))

Every step is exact in float64: scaling by a power of two loses nothing, and `rint` rounds halves to even.
float16, float32, bfloat16 and float8 arrays convert to float64 without loss first; wider floats are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from narrowgauge.errors import FormatError
from narrowgauge.formats.codec import Overflow, check_overflow
from narrowgauge.formats.spec import Format


def encode(values: npt.ArrayLike, fmt: Format, overflow: Overflow = "saturate") -> npt.NDArray[np.uint8]:
    """Return the codes of `values`, any shape, as uint8 (E2M1: one code per byte, in the low four bits).

    Raises FormatError as the scalar oracle does.
    """
    check_overflow(overflow, fmt)
    exact = _as_float64(values)
    nan = np.isnan(exact)
    if fmt.nan_code is None and nan.any():
        raise FormatError(f"{fmt.name} has no code for NaN; remove or replace NaN before encoding.")
    negative = np.signbit(exact)
    infinite = np.isinf(exact)
    magnitude = np.where(nan | infinite, 0.0, np.abs(exact))
    codes = np.where(infinite, fmt.max_code + 1, _magnitude_codes(magnitude, fmt))
    beyond = codes > fmt.max_code
    if overflow == "saturate":
        codes = np.minimum(codes, fmt.max_code)
    elif fmt.inf_code is not None:
        codes = np.where(beyond, fmt.inf_code, codes)
    else:
        nan = nan | beyond
    if not fmt.signed:
        nan = nan | (negative & (exact != 0))
        negative = np.zeros_like(negative)
    if not fmt.has_negative_zero:
        negative = negative & (codes != 0)
    if fmt.nan_code is not None:
        codes = np.where(nan, fmt.nan_code, codes)
    return (codes | np.where(negative, fmt.sign_mask, 0)).astype(np.uint8)


def decode(codes: npt.ArrayLike, fmt: Format) -> npt.NDArray[np.float64]:
    """Return the values of integer `codes`, any shape, as float64 (exact)."""
    raw = np.asarray(codes)
    if not np.issubdtype(raw.dtype, np.integer):
        raise FormatError(f"codes are integers, found {raw.dtype}.")
    wide = raw.astype(np.int64)
    if wide.size and not (wide.min() >= 0 and wide.max() < 1 << fmt.bits):
        bad = wide[(wide < 0) | (wide >= 1 << fmt.bits)][0]
        raise FormatError(f"{fmt.name} has codes 0 to {(1 << fmt.bits) - 1}, found {bad}.")
    magnitude = wide & ~fmt.sign_mask
    negative = (wide & fmt.sign_mask) != 0
    field, fraction = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    normal = (field > 0) | (not fmt.has_zero)
    significand = fraction + np.where(normal, 1 << fmt.mantissa_bits, 0)
    exponent = np.where(normal, field - fmt.bias, fmt.emin) - fmt.mantissa_bits
    values = np.ldexp(significand.astype(np.float64), exponent)
    values[magnitude > fmt.max_code] = np.nan
    if fmt.inf_code is not None:
        values[magnitude == fmt.inf_code] = np.inf
    if fmt.nan_code is not None and fmt.nan_code == fmt.sign_mask:
        values[wide == fmt.sign_mask] = np.nan
    return np.asarray(np.where(negative, -values, values))


def round_to(values: npt.ArrayLike, fmt: Format, overflow: Overflow = "saturate") -> npt.NDArray[np.float64]:
    """Return `values` rounded to the format, as float64: decode(encode(values))."""
    return decode(encode(values, fmt, overflow), fmt)


def _as_float64(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    raw: npt.NDArray[Any] = np.asarray(values)
    too_wide = np.issubdtype(raw.dtype, np.floating) and raw.dtype.itemsize > 8
    if too_wide or np.issubdtype(raw.dtype, np.complexfloating):
        raise FormatError(f"values are {raw.dtype}, more than float64 holds; pass float64 or narrower.")
    with np.errstate(invalid="ignore"):  # widening a signalling NaN warns, and stays NaN
        return raw.astype(np.float64)


def _magnitude_codes(magnitude: npt.NDArray[np.float64], fmt: Format) -> npt.NDArray[np.int64]:
    _, exponent = np.frexp(magnitude)
    # frexp gives zero the exponent 0, which would put it into the binade of 0.5.
    binade = np.where(magnitude == 0, fmt.emin, np.maximum(exponent.astype(np.int64) - 1, fmt.emin))
    ulps = np.rint(np.ldexp(magnitude, fmt.mantissa_bits - binade)).astype(np.int64)
    codes = ((binade - fmt.emin) << fmt.mantissa_bits) + ulps
    if not fmt.has_zero:
        codes = np.maximum(codes - (1 << fmt.mantissa_bits), 0)
    return np.asarray(codes)
