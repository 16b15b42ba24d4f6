"""The moments of one tensor in numpy and float64, every element looked at: the oracle for the passes on the device.

    d = codes * scale in float32        e = x - d        saturated: |x| inv_scale > max (1 + 2^-20), in float32

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from narrowgauge.metrics.bins import (
    EXPONENT_BINS,
    RANGE_BINS,
    RANGE_BLOCK,
    SQNR_BINS,
    exponent_bin,
    histogram,
    sqnr_bin,
)
from narrowgauge.metrics.layout import MOMENTS, Layout

Array = npt.NDArray[Any]


def moments(
    x: Array,
    codes: Array,
    scale: Array,
    inv_scale: Array,
    *,
    scales: Array,
    fmt_max: float,
    amax_ratio: float | None = None,
    layout: Layout = MOMENTS,
) -> Array:
    """Packed moments of a tensor and its codes.

    Args:
        x: [M, K] float32, the high-precision tensor.
        codes: [M, K] float32, the values of its codes before scaling.
        scale, inv_scale: [M, K] float32, of every element.
        scales: the scales themselves, one per granule, any shape.
        fmt_max: the format's largest number.
        amax_ratio: amax now / amax assumed; None without a delayed scale.
        layout: what the slots are.

    Returns:
        [width] float64.
    """
    out = layout.empty()
    finite = np.isfinite(x)
    with np.errstate(all="ignore"):
        d = (codes.astype(np.float32) * scale.astype(np.float32)).astype(np.float64)
        beyond = np.abs(x) * inv_scale.astype(np.float32) > np.float32(fmt_max * (1 + 2.0**-20))
    scaled = finite & np.isfinite(scale)
    compared = scaled & np.isfinite(d)
    wide = np.where(finite, x, 0).astype(np.float64)
    flushed = scaled & (x != 0) & (codes == 0)
    signal = np.where(compared, wide, 0.0) ** 2
    error = np.where(compared, wide - np.where(compared, d, 0), 0.0) ** 2

    values: dict[str, Any] = {
        "numel": x.size,
        "nan_count": np.isnan(x).sum(),
        "inf_count": np.isinf(x).sum(),
        "scaled": scaled.sum(),
        "flushed": flushed.sum(),
        "saturated": (beyond & scaled).sum(),
        "scaled_xx": (wide[scaled] ** 2).sum(),
        "flushed_xx": (wide[flushed] ** 2).sum(),
        "compared": compared.sum(),
        "xx": signal.sum(),
        "xd": (wide[compared] * d[compared]).sum(),
        "dd": (d[compared] ** 2).sum(),
        "ee": error.sum(),
        "row_sqnr": _sqnr(signal.sum(1), error.sum(1)),
        "col_sqnr": _sqnr(signal.sum(0), error.sum(0)),
        "exponents": histogram(exponent_bin(wide[finite]), EXPONENT_BINS),
        "block_range": _block_ranges(np.where(finite, x, 0)),
    }
    if finite.any():
        values["amax"] = np.abs(wide[finite]).max()
    if (wide != 0).any():
        values["amin"] = np.abs(wide[wide != 0]).min()
    if amax_ratio is not None:
        values["amax_ratio"] = amax_ratio
    good = scales[np.isfinite(scales)].astype(np.float64)
    if good.size:
        values |= {"scale_min": good.min(), "scale_max": good.max()}
    for names, data in zip(layout.groups, (wide[finite], good, wide[finite]), strict=True):
        values |= dict(zip(names, _central(data, len(names) - 1), strict=True))
    for name, value in values.items():
        out[layout[name]] = value
    return out


def _central(x: Array, powers: int) -> list[float]:
    """n, mean and the sums of (x - mean)^p for p = 2 ... powers."""
    mean = float(x.mean()) if x.size else 0.0
    return [float(x.size), mean, *(float(((x - mean) ** p).sum()) for p in range(2, powers + 1))]


def _sqnr(signal: Array, error: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        decibel = 10 * np.log10(signal / error)
    return histogram(sqnr_bin(decibel[~np.isnan(decibel)]), SQNR_BINS)


def _block_ranges(x: Array) -> Array:
    """Counts of floor(log2(block amax / |x|)) over runs of 128 columns; the ratio is rounded to float32."""
    out = np.zeros(RANGE_BINS)
    for start in range(0, x.shape[1], RANGE_BLOCK):
        block = np.abs(x[:, start : start + RANGE_BLOCK]).astype(np.float32)
        with np.errstate(all="ignore"):
            ratio = block.max(1, keepdims=True, initial=0) / block
        ratio = ratio[np.isfinite(ratio)]
        out += histogram(np.minimum(np.frexp(ratio)[1] - 1, RANGE_BINS - 1), RANGE_BINS)
    return out
