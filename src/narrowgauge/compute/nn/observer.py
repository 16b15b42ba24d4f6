"""The one door between computing and watching: compute hands tensors out, and knows nothing about who looks.

    operand   input, weight, grad_output    once each per forward and backward: x, and the codes it became
    result    output, grad_input, grad_weight    y, and a few rows or columns of it recomputed in float32

An observer answers `wants` first, per layer and step, without touching the device: where it says no, nothing
is prepared. One that has a method `selects(module, role)` is asked for each result as well. Recomputed forwards
(activation checkpointing) are not shown twice.

Legend: x_MK, w_NK, y_MN, dy_MN, dx_MK, dw_NK; M = tokens, K = input features, N = output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, mm

from narrowgauge.compute.quant import QTensor
from narrowgauge.compute.recipes import Operand

OperandRole = Literal["input", "weight", "grad_output"]
ResultRole = Literal["output", "grad_input", "grad_weight"]
Samples = tuple[Tensor, ...] | None  # what a gradient's check needs: w; or of grad_weight's, columns and x at these


@dataclass(frozen=True)
class GemmSample:
    """A part of a result beside the same part computed in float32 from the high-precision operands.

    `got` and `want` are float32 of one shape: [R, N] rows of output, [R, K] rows of grad_input, [R, C]
    columns of some rows of grad_weight. Everything between them is quantization and gemm error, and nothing else.
    """

    got: Tensor
    want: Tensor


class Observer(Protocol):
    """Who looks. Called inside forward and backward: it must neither sync nor change a tensor."""

    def wants(self, module: str) -> bool:
        """Return whether this step is recorded for the layer `module`; cheap, asked on every forward."""
        ...

    def look(self, module: str, role: str, x: Tensor, rule: Operand, turned: bool) -> Any | None:
        """Return room for what a watching kernel counts while it quantizes x [rows, features] by `rule`.

        `turned`: whether it makes codes of x transposed as well. None: show it to `operand` afterwards. What was
        given room is not shown again.
        """
        ...

    def operand(
        self,
        module: str,
        role: str,
        x: Tensor,
        q: QTensor,
        moments: Tensor | None = None,
        amax_ratio: Tensor | None = None,
    ) -> None:
        """See an operand: x [rows, features] in high precision and q, the copy that fprop or dgrad
        multiplies.

        `amax_ratio` is the amax now over the amax that a delayed or static scale assumed, None for other
        recipes.
        """
        ...

    def result(self, module: str, role: str, y: Tensor, check: GemmSample | None) -> None:
        """See a result y [rows, features], and the gemm check, None in steps when it is another result's turn.

        A GPU shows a result only in its turn: reading every one of them would cost more than all the rest.
        """
        ...


def selects(observer: Observer | None, module: str, role: str) -> bool:
    """Whether an observer looks at one tensor of a layer that it wants: to be asked before anything is computed."""
    asked = getattr(observer, "selects", None)
    return True if asked is None else bool(asked(module, role))


def spread(size: int, count: int, turn: int) -> list[int]:
    """Return `count` indices below `size`, evenly spread and shifted by one with every `turn`; all when
    fewer.

    Deterministic, so that a rerun samples the same rows, and rotating, so that no row stays unseen for ever.
    """
    count = min(size, count)
    return sorted((start * size // count + turn) % size for start in range(count))


@lru_cache(256)
def picked(size: int, count: int, turn: int, device: torch.device) -> Tensor:
    """Return `spread` as an index tensor; the layers of a model share them."""
    if device.type == "cpu":
        return torch.tensor(spread(size, count, turn))
    count = min(size, count)  # computed where it is needed: copying it there would wait for the device
    return ((torch.arange(count, device=device) * size // count + turn) % size).sort().values


def sample_rows(
    y_MN: Tensor, a_MC: Tensor, b_NC: Tensor, bias_N: Tensor | None, count: int, turn: int
) -> GemmSample | None:
    """Return `count` rows of y = a·bᵀ + bias beside their float32 recomputation; None without rows."""
    if y_MN.shape[0] == 0:
        return None
    rows = picked(y_MN.shape[0], count, turn, y_MN.device)
    b_NC = b_NC.detach()
    if a_MC.is_cuda and a_MC.dtype == b_NC.dtype and a_MC.element_size() == 2:  # exact products, and no copy of b
        want = mm(a_MC.index_select(0, rows), b_NC.t(), out_dtype=torch.float32)
    else:
        want = mm(a_MC.index_select(0, rows).float(), b_NC.float().T)
    if bias_N is not None:
        want += bias_N
    return GemmSample(got=y_MN.index_select(0, rows).float(), want=want)
