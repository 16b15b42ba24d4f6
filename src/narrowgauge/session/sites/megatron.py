"""Megatron-Core's parallel linear layers: what this rank multiplies.

    ColumnParallelLinear    x whole, w its share of N, dy its share of N (the whole of N where the output is gathered)
    RowParallelLinear       x its share of K, w its share of K, dy whole

Under sequence parallelism a rank hands in, and gets back, its share of the rows. The layers that Megatron-Core builds
on TransformerEngine are known as TransformerEngine's. A shared embedding comes as an argument and is shown as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from narrowgauge.session.sites.part import Part, first_tensor, is_a, output_of


class Megatron:
    """`ColumnParallelLinear`, `RowParallelLinear` and their subclasses."""

    whole = True

    def knows(self, module: nn.Module) -> bool:
        """Known by name, in Megatron-Core as in older Megatrons."""
        return is_a(module, "megatron", "ColumnParallelLinear", "RowParallelLinear")

    def parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """One product; its weight may have been handed in."""
        given = args[1] if len(args) > 1 else kwargs.get("weight")
        weight = given if isinstance(given, Tensor) else module._parameters.get("weight")
        return (Part(first_tensor(args, kwargs, "input_", "input"), weight, output_of(output)),)
