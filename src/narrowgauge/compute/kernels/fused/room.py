"""Where kernels write codes, and what they need to know of a format.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.compute.quant import Scaling, torch_dtype
from narrowgauge.formats import Format


def room(x_MK: Tensor, fmt: Format, plain: bool, turned: bool) -> tuple[Tensor | None, Tensor | None]:
    """Room for codes [M, K] and [K, M], each only if asked for."""
    (M, K), dtype, device = x_MK.shape, torch_dtype(fmt), x_MK.device
    codes_MK = torch.empty(M, K, dtype=dtype, device=device) if plain else None
    return codes_MK, torch.empty(K, M, dtype=dtype, device=device) if turned else None


def facts(fmt: Format, scaling: Scaling, margin: int) -> tuple[int, float, float, bool, float]:
    """Mantissa bits and largest number of a format; what amax is scaled to, and how the quotient is rounded."""
    return fmt.mantissa_bits, fmt.max, fmt.max * 2.0**-margin, scaling.power_of_two, scaling.amax_floor
