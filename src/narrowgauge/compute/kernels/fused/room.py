"""Where kernels write codes: bytes while they do, float8 afterwards.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.compute.quant import Scaling, torch_dtype
from narrowgauge.formats import Format


def room(x_MK: Tensor, plain: bool, turned: bool) -> tuple[Tensor | None, Tensor | None]:
    """Bytes for codes [M, K] and [K, M], each only if asked for."""
    M, K = x_MK.shape
    codes_MK = torch.empty(M, K, dtype=torch.uint8, device=x_MK.device) if plain else None
    return codes_MK, torch.empty(K, M, dtype=torch.uint8, device=x_MK.device) if turned else None


def as_codes(room: Tensor | None, fmt: Format) -> Tensor | None:
    """The bytes as the format's dtype."""
    return None if room is None else room.view(torch_dtype(fmt))


def facts(fmt: Format, scaling: Scaling, margin: int) -> tuple[int, float, float, bool, float]:
    """Mantissa bits and largest number of a format; what amax is scaled to, and how the quotient is rounded."""
    return fmt.mantissa_bits, fmt.max, fmt.max * 2.0**-margin, scaling.power_of_two, scaling.amax_floor
