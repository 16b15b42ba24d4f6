"""A gemm's result: its own moments, and the gemm check on the part of it that was recomputed.

    amax, n, mean, M2 of y                ww = sum want^2, wg = sum want got, gg = sum got^2, ee = sum (want - got)^2

Sums add up over microbatches, so the check of a step is over all the rows that were sampled in it.

Legend: M = rows, N = columns.
"""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.observe.stats import host
from narrowgauge.observe.stats.centering import Number, center, unit_of
from narrowgauge.observe.stats.packing import head

if TYPE_CHECKING:
    from narrowgauge.compute.nn import GemmSample


HAS_TRITON = importlib.util.find_spec("triton") is not None


def result_head(y: Tensor, check: GemmSample | None = None) -> Tensor | host.Array:
    """The head of the packed moments of a result [..., N] of any float dtype, not empty, and of its gemm check.

    Returns:
        [head_width] float64 on y's device, or outside of torch what was counted on the CPU; a slot that nothing is
        known of is neutral.
    """
    y_MN = y.detach()
    if y.dim() != 2:
        y_MN = y_MN.reshape(-1, y.shape[-1] if y.dim() else 1)
    if y.is_cpu and host.ready():
        counted = host.count_result(y_MN, None if check is None else (check.got, check.want))
        if counted is not None:
            return counted
    checked = {} if check is None else gemm_check(check)
    if y.is_cuda and y.dtype in (torch.float32, torch.bfloat16, torch.float16) and HAS_TRITON:
        from narrowgauge.compute.kernels.fused.watched.result import look_at_result  # triton is slow to import

        out = head(checked, y.device)
        look_at_result(y_MN.contiguous(), out)
        return out
    return head(_values(y_MN) | checked, y.device)


def _values(y_MN: Tensor) -> dict[str, Number]:
    """The moments on any device and of any content, by slot name."""
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
