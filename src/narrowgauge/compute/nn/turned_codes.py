"""Codes of x for wgrad where every line of x has a scale, made in the backward pass; how codes pass through a graph.

Legend: M = tokens (all leading dimensions), K = input features; T = transposed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.compute.nn.call import without_autocast
from narrowgauge.compute.nn.tracing.handle import layer_of
from narrowgauge.compute.nn.tracing.in_graph import Traced
from narrowgauge.compute.nn.tracing.operator import operator, shapes_of

if TYPE_CHECKING:
    from narrowgauge.compute.nn.layer_state import LayerState


@operator
def turned_codes(
    x_MK: Tensor, handle: Tensor, whole: list[int], real: list[float], needed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, M] of x transposed, as wgrad wants them, their scales in a row, and room [needed] uint8.

    The room is one byte long. It tells the compiler how many bytes `linear_backward`, which is given it, takes and
    gives back while it runs. Not knowing them, a plan would keep free memory for a later x through just these moments.
    """
    state: LayerState = layer_of(handle)
    with without_autocast(x_MK.device.type):
        found = state.backend.quantize_both(x_MK, None, state.recipe.uses("input")[1], shared=False)[1]
    assert found is not None  # asked for
    return found.codes.contiguous(), flat(found.scale), _room(x_MK, needed)


@shapes_of(turned_codes)
def _(x_MK: Tensor, handle: Tensor, whole: list[int], real: list[float], needed: int) -> tuple[Tensor, Tensor, Tensor]:
    return *codes_like(x_MK, x_MK.shape, Traced(whole, real)), _room(x_MK, needed)


def codes_like(x: Tensor, rows_and_columns: tuple[int, ...], traced: Traced) -> tuple[Tensor, Tensor]:
    """What stands for codes of x transposed and their scales where there are no numbers."""
    M, K = rows_and_columns
    shape = traced.granularity.scale_shape((K, M))
    scale = x.new_empty(math.prod(shape) if shape else (), dtype=torch.float32)
    return x.new_empty((K, M), dtype=traced.dtype), scale


def _room(like: Tensor, size: int) -> Tensor:
    return like.new_empty(1, dtype=torch.uint8).expand(size)


def flat(scale: Tensor) -> Tensor:
    """All scales in a row, in the order that block scales have in memory: no copy where a kernel of ours made them."""
    return scale.t().reshape(-1) if scale.dim() == 2 else scale


def unflat(row: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Scales of that shape, from their row."""
    return row.view(shape[::-1]).t() if len(shape) == 2 else row
