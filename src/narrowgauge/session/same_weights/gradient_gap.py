"""How far one loss and gradient are from another, in four sums per parameter.

    cosine       <a, b> / (|a| |b|)          with <a, b> = (|a|^2 + |b|^2 - |b - a|^2) / 2
    norm ratio   |b| / |a|
    relative     |b - a| / |a|
    gap %        100 (loss_b - loss_a) / |loss_a|          positive when b is worse

a is the baseline, b the variant. Norms are summed in float64 on the device; the host reads once, at the end. A loss or
gradient of b that is not finite reads as the worst there is (gap and ratio inf, cosine 0), never as NaN, because every
comparison with a NaN is false and would pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KEPT = 20  # layers listed
_ROW = 3  # |a|, |b|, |b - a|


@dataclass(frozen=True)
class Gap:
    """The numbers above, as Python floats; `layers` is (parameter, cosine, relative error), worst first."""

    loss: float
    loss_gap_pct: float
    cosine: float
    norm_ratio: float
    relative: float
    layers: tuple[tuple[str, float, float], ...]


def gap(
    names: Sequence[str],
    loss_a: Tensor,
    loss_b: Tensor,
    grads_a: Sequence[Tensor | None],
    grads_b: Sequence[Tensor | None],
    scale: Tensor | None = None,
) -> Gap:
    """Compare two losses (scalars) and two lists of gradients (None is zero); one read of the device.

    `scale` is what a gradient scaler multiplied both losses with; the loss is reported without it.
    """
    home = loss_a.device
    rows = [_norms(a, b) for a, b in zip(grads_a, grads_b, strict=True)]
    one = torch.ones((), dtype=torch.float64, device=home)
    head = [
        loss_a.reshape(()).double(),
        loss_b.reshape(()).double().to(home),
        one if scale is None else scale.double().to(home),
    ]
    packed = torch.cat([torch.stack(head), *(row.to(home) for row in rows if row is not None)])
    numbers = packed.tolist()
    a, b = numbers[0] / numbers[2], numbers[1] / numbers[2]
    seen = [name for name, row in zip(names, rows, strict=True) if row is not None]
    norms = [tuple(numbers[i : i + _ROW]) for i in range(3, len(numbers), _ROW)]
    layers = [(name, _cosine(*row), _ratio(row[2], row[0])) for name, row in zip(seen, norms, strict=True)]
    total = tuple(math.sqrt(sum(row[i] ** 2 for row in norms)) for i in range(_ROW))
    return Gap(
        loss=a,
        loss_gap_pct=_percent(a, b),
        cosine=_cosine(*total),
        norm_ratio=_ratio(total[1], total[0]),
        relative=_ratio(total[2], total[0]),
        layers=tuple(sorted(layers, key=lambda layer: (-layer[2], layer[0]))[:KEPT]),
    )


@torch.no_grad()
def _norms(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None and b is None:
        return None
    a, b = _dense(a), _dense(b)
    a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
    b = torch.zeros_like(a) if b is None else b
    difference = b.float() - a.float()
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in (a, b, difference)])


def _dense(x: Tensor | None) -> Tensor | None:
    return x.to_dense() if x is not None and x.layout is not torch.strided else x


def _cosine(a: float, b: float, difference: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0
    if a == 0.0 or b == 0.0:
        return 1.0 if a == b else 0.0
    return max(-1.0, min(1.0, (a * a + b * b - difference * difference) / (2.0 * a * b)))


def _ratio(b: float, a: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    if a == 0.0:
        return 1.0 if b == 0.0 else math.inf
    return b / a


def _percent(a: float, b: float) -> float:
    if not math.isfinite(b):
        return math.inf
    return 0.0 if a == b else 100.0 * (b - a) / abs(a) if a else math.inf
