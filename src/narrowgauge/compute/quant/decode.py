"""decode: from 8-bit codes to floats, exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.compute.quant.dtypes import format_of


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of `codes` in `dtype`, the same shape; equal to `codes.to(dtype)`, NaN included."""
    format_of(codes.dtype)
    return codes.to(dtype)
