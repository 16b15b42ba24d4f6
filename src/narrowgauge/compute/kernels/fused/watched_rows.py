"""`rows`, watched: its kernels, then a look over the tensor, which reads it once more.

What is looked at are the plain codes, and their scales: they are made even where only the turned ones are asked for.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from torch import Tensor

from narrowgauge.compute.kernels.fused import rows
from narrowgauge.compute.kernels.fused.look_over import WHOLE, look_over
from narrowgauge.compute.kernels.fused.looks import Look
from narrowgauge.compute.quant import Scaling
from narrowgauge.formats import Format


def cast_rows(
    x_MK: Tensor, fmt: Format, scaling: Scaling, margin: int = 0, *, look: Look, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As `rows.cast_rows`, filling `look`."""
    codes, scale, codes_T, scale_T = rows.cast_rows(x_MK, fmt, scaling, margin, plain=True, turned=turned)
    assert scale is not None
    look_over(x_MK, look, fmt, scale, (1, WHOLE))
    return (codes, scale, codes_T, scale_T) if plain else (None, None, codes_T, scale_T)
