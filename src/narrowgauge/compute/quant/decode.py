"""decode: from 8-bit codes to floats, exactly, without the slow cast.

An 8-bit code is a half-precision number in disguise. E5M2 is the upper byte of one; E4M3FN is one bit
narrower in the exponent, so its bits move one place down and the value comes out 2^(7 - 15) = 1/256 of what
it should be:

    E5M2     s eeeee mm              half: s eeeee mm 00000000             value · 1
    E4M3FN   s eeee mmm              half: s 0eeee mmm 0000000             value · 256

Half-precision subnormals take the same path, so the subnormal codes come out right. Only E4M3FN's two NaN
codes do not (their bits mean 480 here); a tensor that holds one takes torch's cast, as do the FNUZ twins.

Why: on CPU torch 2.13 casts float8 to float32 at 4.6 ns per element on one core (E5M2: 1.0); this takes
0.95 (0.55), finding the NaNs included. Reinterpreting as float32 instead of half saves a pass, but
multiplying float32 subnormals is eight times slower. On a GPU the cast is fast, and looking for NaN would
wait for the device: there it is the cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.compute.quant.dtypes import format_of
from narrowgauge.formats import E4M3FN, E5M2

_E4M3FN_TO_HALF = 2.0 ** (15 - E4M3FN.bias)
_WITHOUT_BIT_14 = ~0x4000


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of `codes` as a new tensor of `dtype`, the same shape and bits as `codes.to(dtype)`.

    Raises FormatError if `codes` is no float8 tensor.
    """
    fmt = format_of(codes.dtype)
    if codes.device.type != "cpu" or codes.numel() == 0 or torch.compiler.is_compiling():
        return codes.to(dtype)
    signed = codes.view(torch.int8)
    # int16 multiplication is a left shift that also carries the sign; torch's shift is slower.
    if fmt is E5M2 and dtype != torch.float16:  # to half there is nothing to convert, which would quiet a NaN
        return signed.to(torch.int16).mul_(1 << 8).view(torch.float16).to(dtype)
    if fmt is E4M3FN and not _has_nan(codes):
        # The sign arrives in bits 15 and 14; bit 14 is the exponent's and must be 0.
        half = signed.to(torch.int16).mul_(1 << 7).bitwise_and_(_WITHOUT_BIT_14).view(torch.float16)
        # To bfloat16 the way through float32 is exact too, and the shorter one.
        wide = half if dtype == torch.float16 else half.float()
        return wide.mul_(_E4M3FN_TO_HALF).to(dtype)
    return codes.to(dtype)


def _has_nan(codes: Tensor) -> bool:
    # 0x7F is the largest int8 and 0xFF the largest uint8: two reductions over bytes, 0.04 ns per element
    # each.
    return bool(codes.view(torch.int8).amax() == 0x7F) or bool(codes.view(torch.uint8).amax() == 0xFF)
