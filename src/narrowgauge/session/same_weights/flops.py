"""Floating-point operations of one forward and backward pass, and the linear layers' part of them.

    total, by_op    what torch's own counter saw: matrix products, convolutions, attention and recurrent layers (also
                    kernels that it leaves out)
    linear          per nn.Linear: 2 M N K for fprop, the same again for dgrad (if its input needs a gradient) and for
                    wgrad (if its weight does)

Recomputed forwards (activation checkpointing) are run, so they count.  Legend: M = tokens, K and N = input and output
features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

Shape = tuple[int, ...]


def attention_flops(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """2 matmuls of every query head: q BHSD, k and v BGTD with G heads shared by groups of query heads.

    torch's own formula refuses G != H, and has no entry for the CPU's kernel.
    """
    scores = 2 * q[0] * q[1] * q[2] * k[2]
    return scores * (q[3] + v[3])


def attention_backward_flops(dy: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """5 matmuls: the scores once more, and the gradients of scores, v, q and k."""
    scores = 2 * q[0] * q[1] * q[2] * k[2]
    return scores * (3 * q[3] + 2 * v[3])


_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_ATTENTION = {
    **{getattr(torch.ops.aten, name): attention_flops for name in _KERNELS},
    **{getattr(torch.ops.aten, f"{name}_backward"): attention_backward_flops for name in _KERNELS},
}


def _gates(x: Shape, weights: Sequence[Shape]) -> int:
    """All products of a recurrent kernel with its matrices, once for each row of x, which is the last axis."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(w) for w in weights if len(w) == 2)


def rnn_flops(x: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """cuDNN's kernel: x TBI (or packed, [rows, I]), the weights of all layers and directions."""
    return _gates(x, weights)


def rnn_backward_flops(x: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """Twice as many: for the gradients of inputs and states, and for those of weights."""
    return 2 * _gates(x, weights)


def lstm_flops_cpu(x: Shape, ih: Shape, hh: Shape, *_: Any, **__: Any) -> int:
    """oneDNN's kernel: one layer in one direction."""
    return _gates(x, (ih, hh))


def lstm_backward_flops_cpu(x: Shape, ih: Shape, hh: Shape, *_: Any, **__: Any) -> int:
    """Twice as many, as cuDNN's."""
    return 2 * _gates(x, (ih, hh))


_RECURRENT = {
    torch.ops.aten._cudnn_rnn: rnn_flops,
    torch.ops.aten._cudnn_rnn_backward: rnn_backward_flops,
    torch.ops.aten.mkldnn_rnn_layer: lstm_flops_cpu,
    torch.ops.aten.mkldnn_rnn_layer_backward: lstm_backward_flops_cpu,
}


@contextmanager
def counted(names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Count what runs inside; the yielded dict is filled at the end. `names` is id(module) -> name."""
    result: dict[str, Any] = {}
    linear: Counter[str] = Counter()

    def forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.Linear) and args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            _count(linear, names.get(id(module), type(module).__name__), module, args[0], output)

    handle = register_module_forward_hook(forward)
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION | _RECURRENT)
    try:
        with counter:
            yield result
    finally:
        handle.remove()
    result["total"] = int(counter.get_total_flops())
    result["by_op"] = {str(op): int(n) for op, n in counter.get_flop_counts().get("Global", {}).items()}
    result["linear"] = dict(linear)


def _count(linear: Counter[str], name: str, module: nn.Linear, x: Tensor, y: Tensor) -> None:
    one = 2 * x.numel() * module.out_features
    linear[name] += one
    if y.requires_grad:
        gemms = int(x.requires_grad) + int(module.weight.requires_grad)

        def backward(_grad: Tensor) -> None:
            # On the output, so that a recomputed forward whose graph is not used does not count twice.
            linear[name] += gemms * one

        y.register_hook(backward)
