"""The quantizer's twin inside the compiled walks on the CPU: scales by a rule, rounding, and what codes stand for.

    inv_scale = rule(amax)        d = round(clamp(x * inv_scale)) * scale        bit by bit as `quant.quantize` has it

Adding c = 1.5 * 2^(e + 23 - m) to a number of binade e, and taking it away again, rounds it to m digits, ties to even.
Below the format's normal numbers e stays that of the smallest one. No code is written.

    code     s eeee mmm    ->    float32    s eeee + (127 - bias) mmm 0000        E4M3FN; subnormals count units

Legend: M = rows, K = columns, RC = granules.
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
    load,
    together,
)  # fmt: skip

Steps = tuple[Number, Number, Number]  # of rounding: see `steps_of`

MANTISSA: Number = np.int32(0x007FFFFF)
HALF: Number = np.int32(0x00400000)
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
    field = as_bits(v) & INFINITY
    c = as_float(((least if field < least else field) + up) | HALF)
    return (v + c) - c


@compiled
def make_scales(
    x_at: Number, shift: int, M: int, K: int, stride: int, tall: int, wide: int, facts: Array, limits: Array,
    scale_RC: Array, inv_RC: Array,
) -> bool:  # fmt: skip
    """A rule's scales of all granules, and what they are the inverses of; False if not all of x is finite."""
    R, C = scale_RC.shape
    amax_RC = np.zeros((R, C), np.int32)
    step = together(K, stride, R * C)
    bits = np.empty(step * K, np.int32)
    for i in range(0, M, step):
        size = min(step, M - i) * K
        load(x_at, shift, i * stride, bits[:size])
        for c in range(C):
            part = bits[c * wide : (c + 1) * wide] if C > 1 else bits[:size]
            largest = np.int32(0)
            for j in range(part.size):
                largest = max(largest, part[j] & MAGNITUDE)
            amax_RC[i // tall, c] = max(amax_RC[i // tall, c], largest)
    for r in range(R):
        for c in range(C):
            if amax_RC[r, c] >= INFINITY:
                return False
            inv_RC[r, c] = inv_scale_of(as_float(amax_RC[r, c]), facts, limits)
            scale_RC[r, c] = ONE / inv_RC[r, c]
    return True


@compiled
def spread(values: Array, width: int, out: Array) -> None:
    """Give every column its granule's value, `width` columns to one."""
    for g in range(values.size):
        out[g * width : (g + 1) * width] = values[g]


@compiled
def round_row(x: Array, inv: Array, scale: Array, steps: Steps, d: Array) -> Number:
    """d, and how many of it are zero."""
    zeros = NONE
    for j in range(x.size):
        d[j] = nearest(x[j], inv[j], steps) * scale[j]
        zeros += ONE if d[j] == NONE else NONE
    return zeros


@compiled
def decode_row(codes: Array, facts: Array, scale: Array, d: Array) -> Number:
    """d of codes, and how many of it are zero; -1 if a code is no number."""
    digits, bias = np.int32(facts[_DIGITS]), np.int32((BIAS - facts[_BIAS]) << 23)
    first, unit = np.int32(1) << digits, as_float(np.int32(BIAS + 1 - facts[_BIAS] - facts[_DIGITS]) << DIGITS)
    add, mask = np.int32(facts[_NAN_ADD]), np.int32(facts[_NAN_MASK])
    zeros, last = NONE, np.int32(0)
    for j in range(d.size):
        code = np.int32(codes[j])
        last = max(last, (code + add) & mask)
        magnitude = code & np.int32(0x7F)
        normal = (magnitude << (DIGITS - digits)) + bias
        bits = normal if magnitude >= first else as_bits(np.float32(magnitude) * unit)
        d[j] = as_float(bits | ((code & np.int32(0x80)) << np.int32(24))) * scale[j]
        zeros += ONE if d[j] == NONE else NONE
    return zeros if last < facts[_NAN_FROM] else -ONE
