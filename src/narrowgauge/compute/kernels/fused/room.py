"""Where kernels write codes, and what they need to know of a format.

Room is taken as compiled graphs take it, without most of what `torch.empty` looks at: in half of its time.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.quant import Scaling, torch_dtype
from narrowgauge.formats import Format

_EMPTY: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def matrix(rows: int, columns: int, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An empty matrix [rows, columns], row-major, beside x; on a GPU, x's has to be the current one."""
    if _EMPTY is not None and x.is_cuda:
        made: Tensor = _EMPTY((rows, columns), (columns, 1), dtype)
        return made
    return torch.empty(rows, columns, dtype=dtype, device=x.device)


def turned_matrix(rows: int, columns: int, x: Tensor) -> Tensor:
    """As `matrix`, float32, column-major."""
    if _EMPTY is not None and x.is_cuda:
        made: Tensor = _EMPTY((rows, columns), (1, rows), torch.float32)
        return made
    return torch.empty_strided((rows, columns), (1, rows), dtype=torch.float32, device=x.device)


def number(x: Tensor) -> Tensor:
    """Room for a float32 number [], beside x; on a GPU, x's has to be the current one."""
    if _EMPTY is not None and x.is_cuda:
        made: Tensor = _EMPTY((), (), torch.float32)
        return made
    return torch.empty((), dtype=torch.float32, device=x.device)


def room(x_MK: Tensor, fmt: Format, plain: bool, turned: bool) -> tuple[Tensor | None, Tensor | None]:
    """Room for codes [M, K] and [K, M], each only if asked for."""
    (M, K), dtype = x_MK.shape, torch_dtype(fmt)
    return matrix(M, K, x_MK, dtype) if plain else None, matrix(K, M, x_MK, dtype) if turned else None


def facts(fmt: Format, scaling: Scaling, margin: int) -> tuple[int, float, float, bool, float]:
    """Mantissa bits and largest number of a format; what amax is scaled to, and how the quotient is rounded."""
    return fmt.mantissa_bits, fmt.max, fmt.max * 2.0**-margin, scaling.power_of_two, scaling.amax_floor


def half_step(fmt: Format) -> float:
    """Half of a format's least positive number: what is scaled below it becomes zero."""
    return 2.0 ** (1 - fmt.bias - fmt.mantissa_bits) / 2
