"""What every kernel needs inside: a granule's inv_scale from its amax, and codes from scaled numbers.

    inv_scale = max / amax                     correctly rounded; then a power of two, if the rule says so
    code      = cast(clamp(y, -max, +max))     to nearest, ties to even; a NaN stays one

The same steps as `quant.scaling` and `quant.quantize`, in float32. Triton's `/` is not IEEE division on a GPU, hence
`div_rn`; a power of two needs no division, for of two positive floats

    floor(log2(max / amax)) = (bits(max) - bits(amax)) >> 23

exactly. Codes come from the instruction that rounds once and saturates, which makes the clamp (an Inf becomes max);
Triton's own cast would round twice on compute capability 8.9, by way of float16. Its interpreter rounds float8 casts
wrongly below the normal range; there, codes are made by arithmetic:

    quantum q = 2^(max(exponent of y, emin) - mantissa bits)        (y + 1.5 * 2^23 q) - 1.5 * 2^23 q rounds y to it

Amaxes travel as the bits of |x|: as integers they are ordered as the magnitudes are, and a NaN is above everything.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
E4M3, E5M2 = 3, 2  # mantissa bits, which tell the two formats apart

# PTX: two float32 to two codes, the second operand's in the lower byte.
_TWO = "cvt.rn.satfinite.{}x2.f32 $0, $2, $1;"
_FOUR = (
    "{{ .reg .b16 a, b; cvt.rn.satfinite.{0}x2.f32 a, $2, $1; cvt.rn.satfinite.{0}x2.f32 b, $4, $3; "
    "mov.b32 $0, {{a, b}}; }}"
)
_TWO_E4M3, _TWO_E5M2 = Constant(_TWO.format("e4m3")), Constant(_TWO.format("e5m2"))
_FOUR_E4M3, _FOUR_E5M2 = Constant(_FOUR.format("e4m3")), Constant(_FOUR.format("e5m2"))


@triton.jit
def widen(x):
    """float32 of any dtype; bfloat16 by its bits, whose subnormals the interpreter would get wrong."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, int32, of a float32 x."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def inv_scale_of(amax, MAX: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr):
    """inv_scale of granules with these amaxes, float32; 1 where amax is 0 (without a floor), Inf or NaN."""
    healthy = amax < float("inf")
    if FLOOR > 0:
        amax = tl.where(amax < FLOOR, FLOOR, amax)
    else:
        healthy = healthy & (amax > 0)
    if POW2 and MAX >= 1.1754943508222875e-38:
        largest = tl.full(amax.shape, MAX, tl.float32).to(tl.int32, bitcast=True)
        exponent = largest - amax.to(tl.int32, bitcast=True)
        # Between 2^-126 and 2^127, then the exponent's bias; what is left of the mantissas goes.
        exponent = tl.minimum(tl.maximum(exponent, -0x3F000000), 0x3F800000)
        inv_scale = ((exponent + 0x3F800000) & 0x7F800000).to(tl.float32, bitcast=True)
    else:
        inv_scale = tl.math.div_rn(tl.full(amax.shape, MAX, tl.float32), tl.where(healthy, amax, 1.0))
        inv_scale = tl.minimum(tl.maximum(inv_scale, 1.1754943508222875e-38), 3.4028234663852886e38)
        if POW2:
            inv_scale = (inv_scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(healthy, inv_scale, 1.0)


@triton.jit
def scale_of(amax, inv_scale, POW2: tl.constexpr = False):
    """The scale beside an inv_scale; NaN where amax is not finite, so that the product shows it."""
    if POW2:  # 2^-e has the exponent field 254 - that of 2^e; 2^-127 is subnormal
        bits = tl.maximum(0x7F000000 - inv_scale.to(tl.int32, bitcast=True), 0x00400000)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), inv_scale)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def to_codes(y, MANTISSA: tl.constexpr, MAX: tl.constexpr, INTERPRET: tl.constexpr):
    """Codes of scaled float32 numbers, as bytes: E4M3FN for 3 mantissa bits, E5M2 for 2."""
    if INTERPRET:
        return _codes_by_arithmetic(tl.clamp(y, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL), MANTISSA)
    if MANTISSA == 3:
        return tl.inline_asm_elementwise(_FOUR_E4M3, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(_FOUR_E5M2, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def to_code_pairs(low, high, MANTISSA: tl.constexpr, MAX: tl.constexpr, INTERPRET: tl.constexpr):
    """Codes of scaled float32 numbers, two to an int16: `low`'s in the lower byte."""
    if INTERPRET:
        below = to_codes(low, MANTISSA, MAX, INTERPRET).to(tl.int16)
        return below | (to_codes(high, MANTISSA, MAX, INTERPRET).to(tl.int16) << 8)
    if MANTISSA == 3:
        return tl.inline_asm_elementwise(_TWO_E4M3, "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(_TWO_E5M2, "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1)


@triton.jit
def _codes_by_arithmetic(y, MANTISSA: tl.constexpr):
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    bits = y.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.abs(y)
    field = tl.maximum((bits >> 23) & 0xFF, 128 - BIAS)
    magic = ((field - MANTISSA + 23) << 23 | 0x400000).to(tl.float32, bitcast=True)
    rounded = (magnitude + magic) - magic
    # A normal code is the float32's own exponent and upper mantissa, rebased; a subnormal one counts quanta.
    normal = (rounded.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    quantum: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    smallest_normal: tl.constexpr = 2.0 ** (1 - BIAS)
    below = rounded < smallest_normal
    subnormal = (tl.where(below, rounded, 0.0) * quantum).to(tl.int32)
    code = tl.where(below, subnormal, normal)
    return tl.where(y != y, sign | 0x7F, sign | code).to(tl.uint8)
