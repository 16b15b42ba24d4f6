"""What a narrow floating-point format is: four small numbers and a choice of specials.

A code is `sign | exponent field E | mantissa field T` with e exponent bits and m mantissa bits. It means

    E > 0:  (-1)^s · 2^(E - bias) · (1 + T / 2^m)          normal
    E = 0:  (-1)^s · 2^(1 - bias) · (T / 2^m)              subnormal and zero

Which codes are kept back for NaN and infinity is the variant, and it moves the largest value:

    IEEE    E = all ones is Inf (T = 0) and NaN (T > 0)            E5M2        max 57344
    FN      only S.1111.111 is NaN, there is no Inf                E4M3FN      max 448
    FNUZ    only 0x80 is NaN: no Inf, no -0; the bias is one up    E4M3FNUZ    max 240
    FINITE  every code is a number                                 E2M1        max 6
    SCALE   unsigned powers of two: no zero, 0xFF is NaN           E8M0        max 2^127

Everything else (ranges, ulp, what flushes to zero) is derived here and typed nowhere.
Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0; for FNUZ "8-bit Numerical
Formats for Deep Neural Networks" (arXiv:2206.02915).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Specials(Enum):
    """Which codes a format keeps back for zero, NaN and infinity."""

    IEEE = "ieee"
    FN = "fn"
    FNUZ = "fnuz"
    FINITE = "finite"
    SCALE = "scale"


@dataclass(frozen=True)
class Format:
    """A number format as frozen data; two formats are the same when all five fields are."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials

    def __hash__(self) -> int:
        return hash(self.name)  # the generated one takes longer than what it is asked for: a dtype in a dictionary

    def __repr__(self) -> str:
        return f"formats.{self.name}"

    @property
    def signed(self) -> bool:
        """Whether the top bit is a sign."""
        return self.specials is not Specials.SCALE

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def has_inf(self) -> bool:
        """Whether some code is an infinity."""
        return self.specials is Specials.IEEE

    @property
    def has_nan(self) -> bool:
        """Whether some code is not a number."""
        return self.specials is not Specials.FINITE

    @property
    def has_zero(self) -> bool:
        """Whether zero has a code (E8M0, a format for scales, has none)."""
        return self.specials is not Specials.SCALE

    @property
    def has_negative_zero(self) -> bool:
        """Whether -0.0 has a code of its own."""
        return self.signed and self.specials is not Specials.FNUZ

    @property
    def sign_mask(self) -> int:
        """The sign bit, 0 when unsigned."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def max_code(self) -> int:
        """Code of the largest finite value, sign clear; the finite magnitudes are the codes up to it."""
        magnitudes = 1 << (self.exponent_bits + self.mantissa_bits)
        if self.specials is Specials.IEEE:
            return magnitudes - (1 << self.mantissa_bits) - 1
        if self.specials in (Specials.FN, Specials.SCALE):
            return magnitudes - 2
        return magnitudes - 1

    @property
    def nan_code(self) -> int | None:
        """The NaN that encoding produces, sign clear, every mantissa bit set; None without one."""
        if self.specials is Specials.FINITE:
            return None
        if self.specials is Specials.FNUZ:
            return self.sign_mask
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def inf_code(self) -> int | None:
        """Code of +Inf, None without one."""
        return self.max_code + 1 if self.has_inf else None

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        # E8M0 spends no field on zero and subnormals, so field 0 is already a normal number.
        return (1 if self.has_zero else 0) - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest value: floor(log2(max))."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        fraction = self.max_code & ((1 << self.mantissa_bits) - 1)
        return 2.0**self.emax * (1 + fraction * 2.0**-self.mantissa_bits)

    @property
    def min_normal(self) -> float:
        """Smallest positive value with full precision."""
        return 2.0**self.emin

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value; equals `min_normal` in E8M0, which has no subnormals."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def flush_below(self) -> float:
        """Largest magnitude that rounds to zero (a tie, and zero is even); 0.0 without a zero to round to."""
        return self.min_subnormal / 2 if self.has_zero else 0.0
