"""A layer whose weight is whole only while it runs (FSDP2, ZeRO 3), in a program that is not compiled.

    forward    w is gathered and quantized; saved are x's codes, and w itself, which is emptied and filled again
    backward   w is gathered again, and quantized again for dgrad

FSDP2 frees and fills w's own memory, ZeRO 3 gives the same parameter other memory (`p.data = ...`): autograd saves a
parameter as that object, so both are found again.

Where a weight stays, its codes would be saved. Here those of all layers, from forward to backward, would be the whole
model on every rank, which is what sharding is there to avoid; so they are not kept between microbatches either
(`kept_weight`). It costs one more read of w. The operator is the compiled layer's (`compiled`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.compute.nn.compiled import linear_forward
from narrowgauge.compute.nn.function import expected_dtype
from narrowgauge.compute.nn.tracing.in_graph import CODES, Traced

if TYPE_CHECKING:
    from narrowgauge.compute.nn.layer_state import LayerState


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState) -> Tensor:
    """`function.fp8_linear` of a weight that will not stay."""
    dtype, numbers = expected_dtype(x, weight, bias), Traced.of(state.recipe, CODES).numbers
    y: Tensor = linear_forward(x, None, weight, bias, state.handle, dtype, torch.is_grad_enabled(), *numbers)[0]
    return y
