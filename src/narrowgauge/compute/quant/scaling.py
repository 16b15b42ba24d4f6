"""Scaling: from the largest magnitude of a granule to the factor that fits it into the format.

    codes = cast(x · inv_scale)        x ≈ codes · scale        scale = 1 / inv_scale

    CURRENT         inv_scale = max · 2^-margin / amax
    CURRENT_POW2    the same, rounded down to a power of two
    ROWWISE         inv_scale = max / amax', amax' = max(amax, 1e-12)
    ROWWISE_POW2    the same, rounded down to a power of two
    E8M0_UP         scale = 2^ceil(log2(amax / max))      as a byte: 127 + that exponent
    E8M0_OCP        scale = 2^(floor(log2 amax) - emax)   largest elements of a block may saturate

Edges: an amax of 0, Inf or NaN gives inv_scale 1, except that ROWWISE reads 0 as 1e-12 and E8M0 gives zero
the smallest scale; a quotient that overflows becomes the largest float32. What a non-finite amax does to
the result is told in quantize.

Powers of two come from the bits of the float, never from log2(), which rounds. Of two positive floats,
bits(a) - bits(b) is the difference of the exponents times 2^23 plus the difference of the mantissas, so
with b = max

    ceil(log2(a / b)) = (bits(a) - bits(b) + 2^23 - 1) >> 23         floor(log2 a) = (bits(a) >> 23) - 127

exactly: amax 448 is byte 127, the next float up is 128. The quotient max / amax is one correctly rounded
division; it cannot round up across a power of two, because the amax next above max · 2^k lies more than
half a step beyond it.
Sources: TransformerEngine (current, power of two, MXFP8), torchao (rowwise), OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.formats import Format

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).tiny

_MANTISSA_BITS = 23
_BIAS = 127
_BYTE_INF = 0xFE
_BYTE_NAN = 0xFF


@dataclass(frozen=True)
class Scaling:
    """A rule that turns amax into inv_scale; frozen data.

    `power_of_two` rounds inv_scale down to a power of two; `amax_floor` is the least amax that a granule is
    credited with; `e8m0` chooses the microscaling rule instead, rounding the scale "up" or by the "ocp"
    floor.
    """

    name: str
    power_of_two: bool = False
    amax_floor: float = 0.0
    e8m0: Literal["up", "ocp"] | None = None


CURRENT = Scaling("current")
CURRENT_POW2 = Scaling("current_pow2", power_of_two=True)
ROWWISE = Scaling("rowwise", amax_floor=1e-12)
ROWWISE_POW2 = Scaling("rowwise_pow2", power_of_two=True, amax_floor=1e-12)
E8M0_UP = Scaling("e8m0_up", power_of_two=True, e8m0="up")
E8M0_OCP = Scaling("e8m0_ocp", power_of_two=True, e8m0="ocp")


def inv_scale_from_amax(amax: Tensor, fmt: Format, scaling: Scaling = CURRENT, margin: int = 0) -> Tensor:
    """Return inv_scale, float32, of amax's shape; finite and positive whatever amax holds.

    `margin` leaves 2^margin of headroom above amax.
    """
    amax = amax.float()
    finite = amax < torch.inf  # False for NaN too; amax is never negative
    if scaling.e8m0 is not None:
        exponent = _e8m0_exponent(amax, fmt, scaling, margin)
        # The byte b means 2^(b - 127); its reciprocal has the exponent field 254 - b.
        inv_scale = ((254 - exponent) << _MANTISSA_BITS).view(torch.float32)
        return torch.where(finite, inv_scale, 1.0)
    if scaling.amax_floor:
        amax = amax.clamp(min=scaling.amax_floor)
    else:
        finite = finite & (amax > 0)
    # Not `fmt.max / amax`: torch computes number / tensor as reciprocal times number, which rounds twice.
    # The margin goes into the numerator: exact there, and in time to keep the quotient from overflowing.
    inv_scale = torch.full_like(amax, fmt.max * 2.0**-margin).div_(amax)
    # A tiny amax overflows the quotient; a large margin could underflow it to something without a reciprocal.
    inv_scale = inv_scale.clamp(FLOAT32_TINY, FLOAT32_MAX)
    if scaling.power_of_two:
        inv_scale = floor_power_of_two(inv_scale)
    return torch.where(finite, inv_scale, 1.0)


def e8m0_bytes(amax: Tensor, fmt: Format, scaling: Scaling = E8M0_UP, margin: int = 0) -> Tensor:
    """Return the E8M0 code of every granule's scale, uint8, of amax's shape.

    amax 0 gives 0x00, Inf 0xFE, NaN 0xFF.
    Raises FormatError for a scaling that is not one of E8M0_UP and E8M0_OCP.
    """
    if scaling.e8m0 is None:
        raise FormatError(f"scaling {scaling.name!r} has no E8M0 bytes; expected E8M0_UP or E8M0_OCP.")
    amax = amax.float()
    exponent = _e8m0_exponent(amax, fmt, scaling, margin)
    exponent = torch.where(amax == torch.inf, _BYTE_INF, exponent)
    return torch.where(amax.isnan(), _BYTE_NAN, exponent).to(torch.uint8)


def floor_power_of_two(value: Tensor) -> Tensor:
    """Return the largest power of two that is not above `value` (float32, positive and normal), exactly."""
    return (value.view(torch.int32) & ~((1 << _MANTISSA_BITS) - 1)).view(torch.float32)


def _e8m0_exponent(amax: Tensor, fmt: Format, scaling: Scaling, margin: int) -> Tensor:
    bits = amax.contiguous().view(torch.int32)
    if scaling.e8m0 == "ocp":
        biased = (bits >> _MANTISSA_BITS) - fmt.emax
    else:
        (max_bits,) = struct.unpack("<i", struct.pack("<f", fmt.max))
        biased = ((bits - max_bits + (1 << _MANTISSA_BITS) - 1) >> _MANTISSA_BITS) + _BIAS
    # Zero and subnormal amax have exponent field 0 and land below byte 0. The upper end is out of reach
    # without a margin; held there, the reciprocal stays a normal float.
    return (biased + margin).clamp(0, 253)
