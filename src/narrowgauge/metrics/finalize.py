"""From packed moments to metrics, in float64.

    std = sqrt(M2 / n)                  l2 = sqrt(M2 + n mean^2)              kurtosis = n M4 / M2^2
    underflow % = 100 flushed / scaled  mse = ee / compared                   sqnr_db = 10 log10(xx / ee)
    gain = xd / xx                      cosine = xd / sqrt(xx dd)             lost energy % = 100 flushed_xx / xx
    gemm_gain = wg / ww                 gemm_cosine = wg / sqrt(ww gg)        gemm_sqnr_db = 10 log10(ww / ee)

A tensor of zeros alone has no scale: that of its codes is what the rule gives to nothing.
0/0 is null, written NaN; a perfect copy (ee = 0) has an SQNR of +inf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from narrowgauge.metrics.bins import sqnr_percentile
from narrowgauge.metrics.catalog import COLUMNS, RESULT_COLUMNS
from narrowgauge.metrics.layout import MOMENTS, Layout

Array = npt.NDArray[Any]

HEAD_ALONE = frozenset(RESULT_COLUMNS)  # metrics that need nothing of the vector's tail


def finalize(moments: Array, layout: Layout = MOMENTS, columns: Sequence[str] = COLUMNS) -> dict[str, Array]:
    """Every metric of every site.

    Args:
        moments: [S, width] packed moments, or [S, head_width] for results: their histograms count nothing.
        layout: what the slots are.
        columns: which metrics; all of them unless told.

    Returns:
        column name -> [S] float64 (counts: int64; histograms: [S, bins] int64), in the order of `columns`.
        A metric that does not apply to a site, or is 0/0, is NaN.
    """
    moments = np.asarray(moments, dtype=np.float64)
    if moments.shape[-1] < layout.width and not HEAD_ALONE.issuperset(columns):
        moments = np.concatenate([moments, layout.empty(len(moments))[:, moments.shape[-1] :]], axis=-1)

    def slot(name: str) -> Array:
        return np.asarray(moments[..., layout[name]])

    n, m2, s_m2 = slot("n"), slot("m2"), slot("sample_m2")
    xx, xd, dd = slot("xx"), slot("xd"), slot("dd")
    ww, zeros = slot("gemm_ww"), slot("amax") == 0
    values: dict[str, Callable[[], Array]] = {
        "numel": lambda: _count(slot("numel")),
        "amax": lambda: _extreme(slot("amax")),
        "amin": lambda: _extreme(slot("amin")),
        "mean": lambda: np.where(n > 0, slot("mean"), np.nan),
        "std": lambda: np.sqrt(_ratio(m2, n)),
        "l2": lambda: np.where(n > 0, np.sqrt(m2 + n * slot("mean") ** 2), np.nan),
        "nan_count": lambda: _count(slot("nan_count")),
        "inf_count": lambda: _count(slot("inf_count")),
        "underflow_pct": lambda: 100 * _ratio(slot("flushed"), slot("scaled")),
        "saturation_pct": lambda: 100 * _ratio(slot("saturated"), slot("scaled")),
        "mse": lambda: _ratio(slot("ee"), slot("compared")),
        "sqnr_db": lambda: _decibel(xx, slot("ee")),
        "cosine": lambda: _cosine(xd, xx, dd),
        "gain": lambda: _ratio(xd, xx),
        # Two float32 sums of the same squares may differ in their last digit.
        "lost_energy_pct": lambda: np.minimum(100 * _ratio(slot("flushed_xx"), slot("scaled_xx")), 100.0),
        "p5_row_sqnr_db": lambda: sqnr_percentile(slot("row_sqnr"), 5),
        "p5_col_sqnr_db": lambda: sqnr_percentile(slot("col_sqnr"), 5),
        "kurtosis": lambda: _ratio(slot("sample_n") * slot("sample_m4"), s_m2**2),
        "exponent_histogram": lambda: _count(slot("exponents")),
        "block_range_histogram": lambda: _count(slot("block_range")),
        "scale_min": lambda: np.where(zeros, np.nan, _extreme(slot("scale_min"))),
        "scale_max": lambda: np.where(zeros, np.nan, _extreme(slot("scale_max"))),
        "scale_std": lambda: np.where(zeros, np.nan, np.sqrt(_ratio(slot("scale_m2"), slot("scale_n")))),
        # Of what holds an Inf it is that one over what was assumed.
        "amax_ratio": lambda: _extreme(slot("amax_ratio"), keep_inf=np.where(slot("inf_count") > 0, np.nan, np.inf)),
        "gemm_gain": lambda: _ratio(slot("gemm_wg"), ww),
        "gemm_cosine": lambda: _cosine(slot("gemm_wg"), ww, slot("gemm_gg")),
        "gemm_sqnr_db": lambda: _decibel(ww, slot("gemm_ee")),
    }
    return {column: values[column]() for column in columns}


def _count(x: Array) -> Array:
    return np.rint(x).astype(np.int64)


def _extreme(x: Array, keep_inf: Array | float = np.nan) -> Array:
    """An extreme, or NaN where it is still neutral; an infinite amax_ratio (assumed amax 0) is a fact."""
    return np.where(np.isfinite(x) | (x == keep_inf), x, np.nan)


def _ratio(a: Array, b: Array) -> Array:
    """a / b; 0/0 is NaN and a/0 an infinity, in silence."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(a / b)


def _decibel(signal: Array, error: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(10 * np.log10(signal / error))


def _cosine(ab: Array, aa: Array, bb: Array) -> Array:
    """Rounding may carry a perfect copy's cosine past 1 by an ulp or two: it is held there."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # Two roots, not the root of the product: aa * bb may leave float64's range.
        return np.asarray(np.clip(ab / (np.sqrt(aa) * np.sqrt(bb)), -1.0, 1.0))
