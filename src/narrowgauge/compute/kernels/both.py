"""One tensor for two gemms: quantized along K for one, along M for the other.

    plain   [M, K], contracted over K            turned  [K, M], contracted over M

One scale per tensor and square blocks give one copy, whose transpose is a view (`shared`); finer scales follow the
contracted dimension, so there are two copies, both made from high precision.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.compute.quant import PerTensor, QTensor, quantize
from narrowgauge.compute.recipes import Operand


@dataclass(frozen=True)
class Given:
    """A scale that was not made from the tensor that it is used for: delayed, static.

    `scale` and `inv_scale` are float32 []; where no scale is `stored`, it is 1 / inv_scale. `slot`, float32 [1] and
    negative before it has seen data, takes the largest amax of what is quantized with this scale; a tensor without
    elements or with a non-finite amax leaves it alone.
    `scratch`, int32 [2], zeros before and after: where the programs of a kernel count themselves.
    """

    stored: Tensor | None
    inv_scale: Tensor
    slot: Tensor | None = None
    scratch: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """The stored one, or made now."""
        return self.inv_scale.reciprocal() if self.stored is None else self.stored


class Both(NamedTuple):
    """The copy that one gemm reads, the copy that the other reads, and the amax [] that a given scale did not need."""

    plain: QTensor | None
    turned: QTensor | None
    amax: Tensor | None = None


def quantize_both(
    x_MK: Tensor,
    plain: Operand | None,
    turned: Operand | None,
    *,
    shared: bool,
    given: Given | None = None,
    amax: Tensor | None = None,
    look: Any | None = None,
) -> Both:
    """Quantize x_MK by one rule or two; a rule that is None asks for nothing. The reference, on any device.

    Args:
        x_MK: [M, K] of any float dtype.
        plain, turned: the rule of each gemm's operand; `turned`'s speaks of [K, M].
        shared: the rules are equal and one copy serves both.
        given: a scale from elsewhere; only where the copy is shared.
        amax: that of this same x, to save its being computed twice; only where the copy is shared.
        look: left alone; only backends that watch fill it.
    """
    if shared:
        rule = plain or turned
        assert rule is not None  # somebody asked
        if amax is None and rule.granularity == PerTensor():
            amax = rule.granularity.amax(x_MK)
        scales = {} if given is None else {"scale": given.scale, "inv_scale": given.inv_scale}
        one = quantize(
            x_MK, rule.fmt, rule.granularity, scaling=rule.scaling, margin=rule.margin, amax=amax, **scales
        )  # fmt: skip
        if given is not None and given.slot is not None and amax is not None and x_MK.numel():
            torch.maximum(given.slot, torch.where(amax < torch.inf, amax, -1.0), out=given.slot)
        return Both(one if plain else None, one.T if turned else None, amax)
    q: QTensor | None = None
    q_T: QTensor | None = None
    if plain:
        q = quantize(x_MK, plain.fmt, plain.granularity, scaling=plain.scaling, margin=plain.margin)
    if turned:
        along_M = turned.granularity.transposed()
        q_T = quantize(x_MK, turned.fmt, along_M, scaling=turned.scaling, margin=turned.margin).T
    return Both(q, q_T)
