"""TransformerEngine's layers, with the quantizers that they hold; in high precision where FP8 is switched off.

    Linear             x, w, dy
    LayerNormLinear    x normed, w, dy. The layer norms inside; it is done once more here, by torch, so that a code may
                       differ from the layer's own by one rounding
    LayerNormMLP       .fc1: x normed, w       .fc2: w, dy        what lies between them never leaves the layer
    GroupedLinear      .0, .1, ...: each expert's rows of x and dy, and its w

    quantizers of gemm g:   forward 3g input, 3g + 1 weight        backward 2g grad_output

A layer is looked at as it returns, while `scale` is still what it used: TransformerEngine moves on at the end of the
autocast. A gradient is looked at as it arrives, before the layer's backward.

Source: TransformerEngine 2.20, transformer_engine/pytorch/module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.compute.nn.operands import OperandRole
from narrowgauge.session.sites.part import Part, Product, Rule, Turn, base_of, first_tensor, is_a, output_of, rows
from narrowgauge.session.sites.te_quantizers import left_high, rule_of
from narrowgauge.session.sites.tensor_parallel import NONE, Copies, copied

PACKAGE = "transformer_engine.pytorch.module"
NAMES = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
_INSIDE = "The input of fc2 and the gradient of fc1 never leave TransformerEngine's LayerNormMLP, and are not recorded."
_ON_DEVICE = (
    "TransformerEngine's GroupedLinear is not recorded where its tokens per expert are counted on the GPU, for which "
    "the host would have to wait, or where its experts' weights are one parameter."
)
_QUANTIZERS = {  # which direction's, how many of a gemm, and which of these
    "input": ("scaling_fwd", 3, 0),
    "weight": ("scaling_fwd", 3, 1),
    "grad_output": ("scaling_bwd", 2, 0),
}
KEPT_HIGH: WeakSet[nn.Module] = WeakSet()  # those that the settings keep out of the autocast; nothing is said of FP8


class TransformerEngine:
    """`Linear`, `LayerNormLinear`, `LayerNormMLP`, `GroupedLinear`, and what is derived from them."""

    whole, in_graph = True, False

    def knows(self, module: nn.Module) -> bool:
        """Known by name; Megatron-Core's TE layers are derived from these."""
        return is_a(module, PACKAGE, *NAMES)

    def parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """One product, two, or one per expert."""
        layer: Any = module
        x, y = first_tensor(args, kwargs, "inp"), output_of(output)
        kind = base_of(module, PACKAGE, *NAMES)
        own = partial(_rule, layer) if layer.fp8 else partial(_high, layer) if module in KEPT_HIGH else None
        if kind == "GroupedLinear":
            splits = args[1] if len(args) > 1 else kwargs.get("m_splits")
            return list(_experts(layer, x, y, splits, own))
        if kind == "LayerNormMLP":
            fc1, fc2 = (module._parameters[name] for name in ("fc1_weight", "fc2_weight"))
            normed_rows = partial(_normed, layer)
            copies = _copies(layer, getattr(layer, "set_parallel_mode", False), "input", "grad_output")
            return (
                Part(x, fc1, None, normed_rows, own=_of(own, 0), suffix=".fc1", holds=("fc1_weight",), copies=copies),
                Part(
                    None, fc2, y, own=_of(own, 1), suffix=".fc2", holds=("fc2_weight",), hidden=_INSIDE, copies=copies
                ),
            )
        normed = kind == "LayerNormLinear"
        x_rows: Turn = partial(_normed, layer) if normed else _cast_to(layer.activation_dtype, x)
        mode = getattr(layer, "parallel_mode", None)
        copies = _copies(layer, mode, "input" if mode == "column" else "grad_output")
        return (Part(x, _weight(layer), y, x_rows, own=_of(own, 0), holds=tuple(layer.weight_names), copies=copies),)

    def product(self, module: nn.Module, x: Tensor) -> Product | None:
        """The shorter way of `parts`, of a Linear in FP8 that no group shares."""
        layer: Any = module
        w = module._parameters.get("weight")
        if w is None or not layer.fp8 or layer.activation_dtype != x.dtype or getattr(layer, "parallel_mode", None):
            return None
        alone = base_of(module, PACKAGE, *NAMES) == "Linear" and len(layer.weight_names) == 1
        return (w, partial(_rule, layer, 0)) if alone else None


def _copies(layer: Any, parallel: Any, *whole: OperandRole) -> Copies:
    """What is whole if the layer is tensor `parallel`, and so alike on the ranks of its group."""
    return copied(layer.tp_group, *whole) if parallel and not layer.sequence_parallel else NONE


def _of(own: Any, gemm: int) -> Any:
    return None if own is None else partial(own, gemm)


def _rule(module: Any, gemm: int, role: OperandRole, x: Tensor) -> Rule | str:
    direction, each, first = _QUANTIZERS[role]
    held, place = module.quantizers[direction], each * gemm + first
    margin = getattr(module.fp8_meta.get("recipe"), "margin", 0)
    return rule_of(held[place] if place < len(held) else None, role, margin)


def _high(module: Any, gemm: int, role: OperandRole, x: Tensor) -> str:
    return left_high(role)


def _weight(module: Any) -> Tensor:
    weights = [module._parameters[name] for name in module.weight_names]
    return weights[0] if len(weights) == 1 else torch.cat([w.detach() for w in weights])


def _cast_to(dtype: torch.dtype, x: Tensor | None) -> Turn:
    return rows if x is None or x.dtype == dtype else partial(_cast, dtype=dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return rows(x).to(dtype)


def _normed(module: Any, x: Tensor) -> Tensor:
    wide, gamma = rows(x).float(), module.layer_norm_weight.detach().float()
    gamma = gamma + 1 if module.zero_centered_gamma else gamma
    if module.normalization == "RMSNorm":
        normed = F.rms_norm(wide, wide.shape[-1:], gamma, module.eps)
    else:
        normed = F.layer_norm(wide, wide.shape[-1:], gamma, module.layer_norm_bias.detach().float(), module.eps)
    return normed.to(module.activation_dtype)


def _experts(module: Any, x: Tensor | None, y: Tensor | None, splits: Any, own: Any) -> Iterator[Part]:
    if isinstance(splits, Tensor):
        splits = splits.tolist() if splits.device.type == "cpu" else None
    weights = [module._parameters.get(f"weight{i}") for i in range(module.num_gemms)]
    if splits is None or any(w is None for w in weights):
        yield Part(None, None, None, hidden=_ON_DEVICE, holds=())
        return
    for i, (first, last) in enumerate(pairwise(accumulate(splits, initial=0))):
        mine: Turn = partial(_slice, first=first, last=last)
        x_rows = partial(_slice, first=first, last=last, dtype=module.activation_dtype)
        yield Part(x, weights[i], y, x_rows, dy_rows=mine, own=_of(own, i), suffix=f".{i}", holds=(f"weight{i}",))


def _slice(x: Tensor, first: int, last: int, dtype: torch.dtype | None = None) -> Tensor:
    mine = rows(x)[first:last]
    return mine if dtype is None else mine.to(dtype)
