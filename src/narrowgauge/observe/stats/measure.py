"""measure: every metric of one tensor at once, in float64 and with nothing sampled.

The slow, plain twin of the watch: `metrics.oracle` in numpy instead of float32 passes on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from narrowgauge.compute.quant import QTensor
from narrowgauge.errors import ShapeError, UsageError
from narrowgauge.metrics import OPERAND_COLUMNS, finalize
from narrowgauge.metrics.oracle import moments as oracle_moments


def measure(x: Tensor, q: QTensor, *, amax_ratio: float | None = None) -> dict[str, float | int | list[int]]:
    """Every metric of a tensor and its codes, by column name, in the frozen order.

    Args:
        x: [..., K] of any float dtype, as it was before it was quantized; all leading dimensions are rows.
        q: its codes and scale, [M, K].
        amax_ratio: amax now / amax that a delayed scale assumed, if there is one.

    Returns:
        column -> float; int for counts; list of int for histograms; NaN where a metric is 0/0. Units are x's own. This
        reads the tensor back from its device.

    Raises:
        ShapeError: x and q have different shapes.
        UsageError: x is no tensor, or q is not what `quantize` returns.

    >>> row = measure(x, quantize(x, E4M3FN))  # doctest: +SKIP
    >>> row["sqnr_db"]  # doctest: +SKIP
    31.5
    """
    if not isinstance(x, Tensor) or not isinstance(q, QTensor):
        raise UsageError(
            f"measure takes a tensor and what quantize made of it (a QTensor), found a {type(x).__name__} and a "
            f"{type(q).__name__}."
        )
    width = x.shape[-1] if x.dim() else 1
    rows = x.numel() // width if width else 0
    if (rows, width) != tuple(q.shape) and x.numel() + q.codes.numel():
        raise ShapeError(
            f"the tensor is {list(x.shape)}, as rows [{rows}, {width}], but its codes are {list(q.shape)};"
            " give the tensor that was quantized"
        )
    granules = (q.granularity.expand(s, q.shape).cpu().clone().numpy() for s in (q.scale, q.inv_scale))
    vector = oracle_moments(
        x.detach().float().cpu().clone().numpy().reshape(q.shape),  # what numpy has seen cannot be resized any more
        q.codes.float().cpu().numpy(),
        *granules,
        scales=q.scale.cpu().clone().numpy(),
        fmt_max=q.fmt.max,
        amax_ratio=amax_ratio,
    )
    return {name: _plain(column[0]) for name, column in finalize(vector[None]).items() if name in OPERAND_COLUMNS}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
