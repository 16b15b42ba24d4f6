"""Hugging Face's `Conv1D` (GPT-2 and its kin): a linear layer whose weight lies as [K, N].

y_MN = x_MK · w_KN       so the weight's rows, by which recipes scale, are the columns of the parameter
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from narrowgauge.session.sites.part import Part, first_tensor, is_a, output_of


class HuggingFaceConv1D:
    """`transformers.pytorch_utils.Conv1D`."""

    whole = in_graph = True

    def knows(self, module: nn.Module) -> bool:
        """Known by its name."""
        return is_a(module, "transformers", "Conv1D")

    def parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Sequence[Part]:
        """One product, its weight turned."""
        weight = module._parameters.get("weight")
        return (Part(first_tensor(args, kwargs, "x"), weight, output_of(output), w_rows=lambda w: w.t()),)
