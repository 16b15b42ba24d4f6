"""How a compiled graph names a layer: by the address of a tensor that the layer owns.

A number would be baked into the graph, and every block of a model compiled anew. A tensor is an input like any other,
so one graph serves all layers of a shape (a block compiled once, and run 32 times), also from inside a CUDA graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.quant import Block, Granularity, PerRow, PerTensor

CODES, INPUT, INPUT_AND_AMAX = range(3)  # what a forward saves of its input for the backward pass

_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(state: object, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of one element whose address names a layer, for as long as its `state` keeps it."""
    handle = torch.zeros(1, device=device)
    handle._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]  # as mark_static_address does
    _LAYERS[handle.data_ptr()] = state
    return handle


def layer_of(handle: Tensor) -> Any:
    """The state of the layer that owns this handle."""
    return _LAYERS[handle.data_ptr()]


def grain_of(granularity: Granularity, e5m2: bool) -> list[int]:
    """A granularity in numbers, which an operator can take: is it E5M2; a block's rows and columns, 0 for all."""
    match granularity:
        case PerTensor():
            return [int(e5m2), 0, 0]
        case PerRow():
            return [int(e5m2), 1, 0]
        case Block(rows, cols):
            return [int(e5m2), rows, cols]
    raise AssertionError(granularity)  # recipes have no others


def granularity_of(grain: list[int]) -> Granularity:
    """The granularity that `grain_of` was given."""
    _, rows, cols = grain
    return Block(rows, cols) if cols else PerRow() if rows else PerTensor()
