"""Megatron-Core's parallel linear layers: what this rank multiplies.

    ColumnParallelLinear    x whole, w its share of N, dy its share of N (the whole of N where the output is gathered)
    RowParallelLinear       x its share of K, w its share of K, dy whole

What is whole is the same on all ranks of the layer's group. Under sequence parallelism a rank hands in, and gets back,
its share of the rows; experts that gather tokens by themselves are fed differently. The layers that Megatron-Core
builds on TransformerEngine are known as TransformerEngine's. A shared embedding comes as an argument and is shown so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from narrowgauge.compute.nn.operands import OperandRole
from narrowgauge.session.sites.part import Part, first_tensor, is_a, output_of
from narrowgauge.session.sites.tensor_parallel import NONE, Copies, copied


class Megatron:
    """`ColumnParallelLinear`, `RowParallelLinear` and their subclasses."""

    whole, in_graph = True, False

    def knows(self, module: nn.Module) -> bool:
        """Known by name, in Megatron-Core as in older Megatrons."""
        return is_a(module, "megatron", "ColumnParallelLinear", "RowParallelLinear")

    def parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """One product; its weight may have been handed in."""
        given = args[1] if len(args) > 1 else kwargs.get("weight")
        weight = given if isinstance(given, Tensor) else module._parameters.get("weight")
        x = first_tensor(args, kwargs, "input_", "input")
        return (Part(x, weight, output_of(output), copies=_copies(module, kwargs)),)


def _copies(layer: Any, kwargs: dict[str, Any]) -> Copies:
    if getattr(layer, "sequence_parallel", False) or getattr(layer, "explicit_expert_comm", False):
        return NONE
    if is_a(layer, "megatron", "RowParallelLinear"):
        x_whole, dy_whole = not getattr(layer, "input_is_parallel", True), True
    else:
        gathers = kwargs.get("runtime_gather_output")
        x_whole, dy_whole = True, getattr(layer, "gather_output", False) if gathers is None else gathers
    whole: tuple[tuple[OperandRole, bool], ...] = (("input", x_whole), ("grad_output", dy_whole))
    return copied(getattr(layer, "tp_group", None), *(role for role, is_whole in whole if is_whole))
