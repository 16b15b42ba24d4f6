"""A gemm's result: its own moments, and the gemm check on the part of it that was recomputed.

    amax, n, mean, M2 of y                ww = sum want^2, wg = sum want got, gg = sum got^2, ee = sum (want - got)^2

Sums add up over microbatches, so the check of a step is over all the rows that were sampled in it.

Legend: M = rows, N = columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from narrowgauge.observe.stats.centering import ALIKE, Number, center, unit_of
from narrowgauge.observe.stats.scratch import scratch
from narrowgauge.observe.stats.whole import LARGEST, SMALLEST, squared

if TYPE_CHECKING:
    from narrowgauge.compute.nn import GemmSample

RUN = 1 << 19  # elements looked at together on the CPU


def result_values(y: Tensor) -> list[dict[str, Number]]:
    """The slots of the packed moments that speak of a result [..., N] of any float dtype, for each run of its rows."""
    if y.numel() == 0:
        return []
    y_MN = y.detach().reshape(-1, y.shape[-1] if y.dim() else 1)
    if y.device.type != "cpu":
        return [_values(y_MN)]
    runs = y_MN.split(max(1, RUN // y_MN.shape[1]))
    return [_whole(run) or _values(run) for run in runs]


def _whole(y_MN: Tensor) -> dict[str, Number] | None:
    """The values on the CPU, from few passes; None if something is not finite or its squares may not fit."""
    y = y_MN if y_MN.dtype == torch.float32 else scratch(*y_MN.shape).a.copy_(y_MN)
    low, high = torch.aminmax(y)
    amax = max(-float(low), float(high))
    if not SMALLEST <= amax <= LARGEST:  # nor is NaN
        return None
    n = float(y.numel())
    energy = float(squared(torch.linalg.vector_norm(y, dim=1)).sum())
    mean: Number = float(y.sum(1).numpy().sum(dtype=np.float64)) / n
    m2: Number = energy - n * mean**2
    if float(m2) <= ALIKE * energy:
        mean, m2 = center(y)
    return {"numel": n, "n": n, "amax": amax, "mean": mean, "m2": m2}


def _values(y_MN: Tensor) -> dict[str, Number]:
    """The values on any device and of any content."""
    y = y_MN.to(torch.float32)
    finite, nan = y.isfinite(), y.isnan()
    y = torch.where(finite, y, 0.0)
    amax = y.abs().amax()
    unit = unit_of(amax)
    back = 1.0 / unit.double()
    mean, m2 = center(y.mul_(unit), finite)
    return {
        "numel": float(y.numel()),
        "n": finite.sum().double(),
        "nan_count": nan.sum().double(),
        "inf_count": (~(finite | nan)).sum().double(),
        # With nothing finite the neutral value stays, as if there was nothing.
        "amax": torch.where(finite.any(), amax, -math.inf),
        "mean": mean * back,
        "m2": m2 * back**2,
    }


def gemm_check(sample: GemmSample) -> dict[str, Number]:
    """The sums of a gemm check, in float64; elements that are not finite on either side are left out."""
    got, want = (t.detach().double().reshape(-1) for t in (sample.got, sample.want))
    both = got.isfinite() & want.isfinite()
    got, want = torch.where(both, got, 0.0), torch.where(both, want, 0.0)
    error = want - got
    return {
        "gemm_ww": torch.dot(want, want),
        "gemm_wg": torch.dot(want, got),
        "gemm_gg": torch.dot(got, got),
        "gemm_ee": torch.dot(error, error),
    }
