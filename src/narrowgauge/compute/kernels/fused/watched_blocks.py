"""`blocks`, watched: its kernel, then a look over the tensor, which reads it once more.

What is looked at are the plain codes, and their scales: they are made even where only the turned ones are asked for.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from torch import Tensor

from narrowgauge.compute.kernels.fused import blocks
from narrowgauge.compute.kernels.fused.look_over import look_over
from narrowgauge.compute.kernels.fused.looks import Look
from narrowgauge.compute.kernels.fused.tile import SIDE
from narrowgauge.compute.quant import Scaling
from narrowgauge.formats import Format


def cast_tiles(
    x_MK: Tensor, fmt: Format, scaling: Scaling, margin: int = 0, *, look: Look, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As `blocks.cast_tiles`, filling `look`."""
    codes, scale, codes_T, scale_T = blocks.cast_tiles(x_MK, fmt, scaling, margin, plain=True, turned=turned)
    assert scale is not None
    look_over(x_MK, look, fmt, scale, (1, SIDE))
    return (codes, scale, codes_T, scale_T) if plain else (None, None, codes_T, scale_T)


def cast_squares(
    x_MK: Tensor, fmt: Format, scaling: Scaling, margin: int = 0, *, look: Look, plain: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """As `blocks.cast_squares`, filling `look`."""
    codes, codes_T, scale = blocks.cast_squares(x_MK, fmt, scaling, margin, plain=plain, turned=turned)
    look_over(x_MK, look, fmt, scale, (SIDE, SIDE))
    return codes, codes_T, scale
