"""How a compiled graph names a layer: by the address of a tensor that the layer owns.

A number would be baked into the graph, and every block of a model compiled anew. A tensor is an input like any other,
so one graph serves all layers of a shape (a block compiled once, and run 32 times), also from inside a CUDA graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import ConversionError

_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(state: object, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of one element whose address names a layer, for as long as its `state` keeps it."""
    handle = torch.zeros(1, device=device)
    handle._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]  # as mark_static_address does
    _LAYERS[handle.data_ptr()] = state
    return handle


def layer_of(handle: Tensor) -> Any:
    """The state of the layer that owns this handle; ConversionError if there is no such layer any more."""
    state = _LAYERS.get(handle.data_ptr())
    if state is None:
        raise ConversionError(
            "a compiled graph looks for its converted layer, and it is gone: the model was reverted or deleted between "
            "a forward pass and its backward. Run the backward pass first; after that, convert again if you like."
        )
    return state
