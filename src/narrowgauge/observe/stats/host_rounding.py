"""The quantizer's twin inside the compiled walks on the CPU: scales by a rule, rounding, and what codes stand for.

    inv_scale = rule(amax)        d = round(clamp(x * inv_scale)) * scale        bit by bit as `quant.quantize` has it

Adding c = 1.5 * 2^(e + 23 - m) to a number of binade e, and taking it away again, rounds it to m digits, ties to even.
Below the format's normal numbers e stays that of the smallest one. No code is written.

    code     s eeee mmm    ->    float32    s eeee + (127 - bias) mmm 0000        E4M3FN; subnormals count units

Legend: K = columns.
"""

from __future__ import annotations

import numpy as np

from narrowgauge.observe.stats.host_bits import (
    BIAS,
    DIGITS,
    INFINITY,
    MAGNITUDE,
    NONE,
    ONE,
    Array,
    Number,
    as_bits,
    as_float,
    compiled,
    exact,
    widely,
)  # fmt: skip

Steps = tuple[Number, Number, Number]  # of rounding: see `steps_of`

MANTISSA: Number = np.int32(0x007FFFFF)
HALF: Number = np.int32(0x00400000)
UNIT: Number = np.int32(0x00800000)  # one binade
LARGEST: Number = np.finfo(np.float32).max
TINY: Number = np.finfo(np.float32).tiny

# A format and a rule as numbers: int64, and float32. `nan`: a code is no number if ((code + add) & mask) >= from.
FACTS = ("digits", "bias", "nan_add", "nan_mask", "nan_from", "power_of_two", "e8m0", "emax", "margin")
_DIGITS, _BIAS, _NAN_ADD, _NAN_MASK, _NAN_FROM, _POWER_OF_TWO, _E8M0, _EMAX, _MARGIN = range(len(FACTS))
LIMITS = ("most", "beyond", "numerator", "floor")
MOST, BEYOND, _NUMERATOR, _FLOOR = range(len(LIMITS))
OCP = 2  # of e8m0; 1 rounds up, 0 is none


@exact
def inv_scale_of(amax: Number, facts: Array, limits: Array) -> Number:
    """The twin of `quant.inv_scale_from_amax` for one finite amax."""
    if facts[_E8M0]:
        bits = as_bits(amax)
        if facts[_E8M0] == OCP:
            biased = np.int64(bits >> DIGITS) - facts[_EMAX]
        else:
            above = np.int64(bits) - np.int64(as_bits(limits[MOST])) + (1 << 23) - 1
            biased = (above >> 23) + BIAS
        return as_float(np.int32(254 - min(max(biased + facts[_MARGIN], 0), 253)) << DIGITS)
    if limits[_FLOOR] > NONE:
        amax = max(amax, limits[_FLOOR])
    elif amax == NONE:
        return ONE
    inv = min(max(limits[_NUMERATOR] / amax, TINY), LARGEST)
    return as_float(as_bits(inv) & ~MANTISSA) if facts[_POWER_OF_TWO] else inv


@exact
def inverse(scale: Number) -> Number:
    """The twin of `QTensor.inv_scale`."""
    return min(ONE / scale, LARGEST) if scale == scale else ONE


@compiled
def steps_of(facts: Array, limits: Array) -> Steps:
    """What rounding to a format needs: its largest number, its least binade, and how many c lies above x's."""
    return limits[MOST], np.int32((BIAS + 1 - facts[_BIAS]) << 23), np.int32((23 - facts[_DIGITS]) << 23)


@exact
def nearest(x: Number, inv: Number, steps: Steps) -> Number:
    """The number of the format that x * inv becomes; see the module's head."""
    most, least, up = steps
    v = x * inv
    v = most if v > most else v
    v = -most if v < -most else v
    field = np.int32(as_bits(v) & INFINITY)
    c = as_float(((least if field < least else field) + up) | HALF)
    return (v + c) - c


@exact
def flushed_up_to(inv: Number, steps: Steps) -> Number:
    """Bits of the largest number that becomes zero: rounding is monotone, so all smaller ones do too.

    It is the one that lands on half of the format's least number, which ties to even, or next to it.
    """
    _, least, up = steps
    limit = as_bits(min(as_float(least + up - (DIGITS + np.int32(1)) * UNIT) / inv, LARGEST))
    while limit > np.int32(0) and nearest(as_float(limit), inv, steps) != NONE:
        limit = np.int32(limit - np.int32(1))
    while limit < INFINITY - np.int32(1) and nearest(as_float(np.int32(limit + np.int32(1))), inv, steps) == NONE:
        limit = np.int32(limit + np.int32(1))
    return limit


@compiled
def spread(values: Array, first: int, count: int, width: int, out: Array) -> None:
    """Give every column its granule's value: `count` of them from `first` on, `width` columns to one.

    Slices, from their beginning: any other index might be negative to the compiler, which then vectorizes nothing.
    """
    widely()
    for g in range(count):
        value, part = values[first + g], out[g * width : min((g + 1) * width, out.size)]
        for j in range(part.size):
            part[j] = value


@compiled
def round_row(x: Array, inv: Array, scale: Array, steps: Steps, d: Array) -> None:
    """What the numbers stand for once they are rounded."""
    widely()
    for j in range(x.size):
        d[j] = nearest(x[j], inv[j], steps) * scale[j]


@compiled
def decode_row(codes: Array, facts: Array, scale: Array, d: Array) -> None:
    """What the codes stand for, all of which are numbers."""
    widely()
    digits, bias = np.int32(facts[_DIGITS]), np.int32((BIAS - facts[_BIAS]) << 23)
    first, unit = np.int32(1) << digits, as_float(np.int32(BIAS + 1 - facts[_BIAS] - facts[_DIGITS]) << DIGITS)
    for j in range(d.size):
        code = np.int32(codes[j])
        magnitude = code & np.int32(0x7F)
        normal = (magnitude << (DIGITS - digits)) + bias
        bits = normal if magnitude >= first else as_bits(np.float32(magnitude) * unit)
        d[j] = as_float(bits | ((code & np.int32(0x80)) << np.int32(24))) * scale[j]


@compiled
def zero_codes(bits: Array, codes: Array, facts: Array) -> Number:
    """How many numbers that are not zero, given by their bits, have a code that is; -1 if a code is no number."""
    widely()
    add, mask = np.uint8(facts[_NAN_ADD]), np.uint8(facts[_NAN_MASK])
    least, last = np.uint8(0x7F), np.uint8(0)
    for j in range(codes.size):
        least = min(least, np.uint8(codes[j] & np.uint8(0x7F)))
        last = max(last, np.uint8(np.uint8(codes[j] + add) & mask))
    if last >= facts[_NAN_FROM]:
        return -ONE
    zeros = NONE
    if least == np.uint8(0):
        for j in range(codes.size):
            gone = (codes[j] & np.uint8(0x7F)) == np.uint8(0) and (bits[j] & MAGNITUDE) != np.int32(0)
            zeros += ONE if gone else NONE
    return zeros
