"""A gemm's result: its own moments, and the gemm check on the part of it that was recomputed.

    amax, n, mean, M2 of y                 ww = sum want^2, wg = sum want got, gg = sum got^2, ee = sum (want - got)^2

Sums add up over microbatches, so the check of a step is over all the rows that were sampled in it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.observe.stats.centering import Number, center, unit_of

if TYPE_CHECKING:
    from narrowgauge.compute.nn import GemmSample


def result_values(y: Tensor) -> dict[str, Number]:
    """The slots of the packed moments that speak of a result [..., N] of any float dtype; none for an empty one."""
    if y.numel() == 0:
        return {}
    y_MN = y.detach().to(torch.float32).contiguous().view(-1, y.shape[-1] if y.dim() else 1)
    n = float(y_MN.numel())
    values: dict[str, Number] = {"numel": n, "n": n}
    low, high = torch.aminmax(y_MN)
    amax = torch.maximum(-low, high)
    finite = None
    if not (y.device.type == "cpu" and math.isfinite(float(amax))):
        finite, nan = y_MN.isfinite(), y_MN.isnan()
        values["n"], values["nan_count"] = finite.sum().double(), nan.sum().double()
        values["inf_count"] = n - values["n"] - values["nan_count"]
        y_MN = torch.where(finite, y_MN, 0.0)
        # With nothing finite the neutral value stays, as if there was nothing.
        amax = torch.where(finite.any(), y_MN.abs().amax(), -math.inf)
    values["amax"] = amax
    unit = unit_of(amax)
    back = 1.0 / unit.double()
    v_MN = y_MN * unit
    mean, m2 = center(v_MN, (v_MN * v_MN).sum(1), finite)
    values["mean"], values["m2"] = mean * back, m2 * back**2
    return values


def gemm_check(sample: GemmSample) -> dict[str, Number]:
    """The sums of a gemm check, in float64; elements that are not finite on either side are left out."""
    got, want = sample.got.detach().double().view(-1), sample.want.detach().double().view(-1)
    both = got.isfinite() & want.isfinite()
    got, want = torch.where(both, got, 0.0), torch.where(both, want, 0.0)
    error = want - got
    return {
        "gemm_ww": torch.dot(want, want),
        "gemm_wg": torch.dot(want, got),
        "gemm_gg": torch.dot(got, got),
        "gemm_ee": torch.dot(error, error),
    }
