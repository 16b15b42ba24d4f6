"""A whole linear layer in BF16, of ours and of torchao: its casts with its products.

    forward    y = x w^T without gradients             2 M N K operations
    step       forward and backward                    6 M N K operations

The three products of tensorwise and of rowwise are one and the same `torch._scaled_mm` in both libraries, but that
torchao's accumulates shortly in fprop; so it is with the casts around them that they are compared. On a GPU each layer
is compiled. Blockwise is ours alone.

Legend: M = tokens, N = output features, K = input features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from narrowgauge.bench.operands import Tensors, native
from narrowgauge.bench.peer_casts import compiled
from narrowgauge.bench.peers import PEERS, apply_peer
from narrowgauge.compute.nn import convert
from narrowgauge.compute.recipes import by_name

OURS = ("current", "rowwise", "blockwise")
PASSES = {"forward": 1, "step": 3}  # products
NOBODY = "none is kept high"


def layers(tensors: Tensors, peer: str) -> dict[str, nn.Module]:
    """The layer by the name of its column; of our recipes those that run natively here, on a CPU all, emulated."""
    device = tensors.weight.device
    made: dict[str, nn.Module] = {"bf16": _plain(tensors)}
    for name in OURS:
        if device.type != "cuda" or native(by_name(name), device) is not None:
            made[name] = convert(nn.Sequential(_plain(tensors)), recipe=name)[0]
    for name in PEERS[peer]:
        made[f"{peer} {name}"] = apply_peer(nn.Sequential(_plain(tensors)), peer, name, NOBODY)
    return made


def layer_calls(every: dict[str, nn.Module], tensors: Tensors, what: str) -> dict[str, Callable[[], object]]:
    """A call of each layer: its forward, or with its backward for a given dy_MN."""
    return {name: _call(name, layer, tensors, what) for name, layer in every.items()}


def _call(name: str, layer: nn.Module, tensors: Tensors, what: str) -> Callable[[], object]:
    def through(x_MK: Tensor) -> Tensor:
        y_MN: Tensor = layer(x_MK)
        return y_MN

    run = compiled(through, f"{what} {name}", tensors.input.device)
    x_MK = tensors.input.detach().requires_grad_(what == "step")
    wanted = (x_MK, *layer.parameters())

    def forward() -> object:
        with torch.no_grad():
            return run(x_MK)

    def step() -> object:
        return torch.autograd.grad(run(x_MK), wanted, tensors.grad_output)

    return step if what == "step" else forward


def _plain(tensors: Tensors) -> nn.Linear:
    N, K = tensors.weight.shape
    layer = nn.Linear(K, N, bias=False, device="meta")
    layer.weight = nn.Parameter(tensors.weight)
    return layer
