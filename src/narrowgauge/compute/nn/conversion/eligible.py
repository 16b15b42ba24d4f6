"""Which linear layers can run in FP8 at all, whatever the rules say.

Conversion swaps the class of a plain `nn.Linear`, so everything that gives a layer a behaviour of its own (a
subclass, a parametrization, a computed weight, a replaced forward) would be lost or bypassed: those stay
high, and the report says why. Weights of a type that mixed-precision training does not use stay high too.
"""

from __future__ import annotations

import torch
from torch import nn

from narrowgauge.compute.nn.conversion.structure import Layer
from narrowgauge.compute.nn.parallel import placements
from narrowgauge.compute.nn.parallel.wrapped import class_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(layer: Layer) -> str | None:
    """Why this layer's class could not be swapped, or None when it can. Shapes are the backend's matter."""
    module = layer.module
    if class_of(module) is not nn.Linear:
        return _class_refusal(module)
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, so another class would have no effect"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (weight norm, spectral norm or pruning), not a parameter"
    if placements.is_distributed(weight):
        if (why := placements.refusal(weight, gathered=layer.gathered)) is not None:
            return why
    elif type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}; plain tensors and DTensors can be quantized"
    if weight.device.type == "meta":
        return "its weight is on the meta device: materialize the model (`to_empty`, then load), then convert"
    if weight.dtype not in DTYPES:
        return f"its weight is {_dtype(weight.dtype)}; float32, bfloat16 or float16 can be quantized"
    if not weight.numel() and not placements.is_partitioned(weight):
        return "its weight is empty"
    if weight.layout != torch.strided:
        return f"its weight's layout is {str(weight.layout).removeprefix('torch.')}, not strided"
    return None


def _class_refusal(module: nn.Module) -> str:
    name = class_of(module).__name__
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return f"{name} has no weight yet: run the model once, then convert"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return f"its {' and '.join(module.parametrizations)} is parametrized"  # type: ignore[arg-type]
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies its packed in_proj_weight itself; it is no nn.Linear"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it"
    if isinstance(module, nn.Linear):
        return f"{name} is a subclass of nn.Linear with a behaviour of its own"
    return f"{name} is no nn.Linear"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
