"""One tensor for two gemms: quantized along K for one, along M for the other.

    plain   [M, K], contracted over K            turned  [K, M], contracted over M

One scale per tensor and square blocks give one copy, whose transpose is a view (`shared`); finer scales follow the
contracted dimension, so there are two copies, both made from high precision.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from torch import Tensor

from narrowgauge.compute.quant import QTensor, quantize
from narrowgauge.compute.recipes import Operand

Both = tuple[QTensor | None, QTensor | None]


def quantize_both(
    x_MK: Tensor,
    plain: Operand | None,
    turned: Operand | None,
    *,
    shared: bool,
    scale: Tensor | None = None,
    inv_scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Both:
    """Quantize x_MK by one rule or two; a rule that is None asks for nothing. The reference, on any device.

    Args:
        x_MK: [M, K] of any float dtype.
        plain, turned: the rule of each gemm's operand; `turned`'s speaks of [K, M].
        shared: the rules are equal and one copy serves both.
        scale, inv_scale, amax: given ones, as `quantize` takes them; only where the copy is shared.
    """
    if shared:
        rule = plain or turned
        assert rule is not None  # somebody asked
        one = quantize(
            x_MK, rule.fmt, rule.granularity, scaling=rule.scaling, margin=rule.margin,
            scale=scale, inv_scale=inv_scale, amax=amax,
        )  # fmt: skip
        return (one if plain else None), (one.T if turned else None)
    q: QTensor | None = None
    q_T: QTensor | None = None
    if plain:
        q = quantize(x_MK, plain.fmt, plain.granularity, scaling=plain.scaling, margin=plain.margin)
    if turned:
        along_M = turned.granularity.transposed()
        q_T = quantize(x_MK, turned.fmt, along_M, scaling=turned.scaling, margin=turned.margin).T
    return q, q_T
