from pathlib import Path

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.metrics import (
    CATALOG,
    COLUMNS,
    HISTOGRAMS,
    MOMENTS,
    OPERAND_COLUMNS,
    RESULT_COLUMNS,
    ROLES,
    by_name,
    finalize,
)
from narrowgauge.metrics.page import render

FROZEN = [
    "numel",
    "amax",
    "amin",
    "mean",
    "std",
    "l2",
    "nan_count",
    "inf_count",
    "underflow_pct",
    "saturation_pct",
    "mse",
    "sqnr_db",
    "cosine",
    "gain",
    "lost_energy_pct",
    "p5_row_sqnr_db",
    "p5_col_sqnr_db",
    "kurtosis",
    "exponent_histogram",
    "block_range_histogram",
    "scale_min",
    "scale_max",
    "scale_std",
    "amax_ratio",
]
CHECK = ["gemm_gain", "gemm_cosine", "gemm_sqnr_db"]


def test_the_columns_and_their_order_are_frozen():
    assert list(OPERAND_COLUMNS) == FROZEN
    assert list(COLUMNS) == FROZEN + CHECK


def test_results_carry_their_own_moments_and_the_gemm_check():
    assert list(RESULT_COLUMNS) == ["numel", "amax", "mean", "std", "l2", "nan_count", "inf_count", *CHECK]


def test_every_metric_is_described():
    for metric in CATALOG.values():
        assert metric.meaning.endswith(".")
        assert metric.formula
        assert metric.merge
        assert set(metric.roles) <= set(ROLES)
        assert metric.kind in ("float", "count", "histogram")
        assert metric.is_histogram == (metric.bins > 0)


def test_kinds_and_bins_are_those_of_the_values():
    values = finalize(MOMENTS.empty(3))
    assert list(values) == list(COLUMNS)
    for name, column in values.items():
        metric = by_name(name)
        assert column.shape == ((3, metric.bins) if metric.is_histogram else (3,))
        assert (column.dtype == "int64") == (metric.kind != "float")
    assert [name for name, column in values.items() if column.ndim == 2] == list(HISTOGRAMS)


def test_an_unknown_metric_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="there is no metric 'sqnr'; did you mean 'sqnr_db'"):
        by_name("sqnr")


def test_the_reference_page_is_what_the_catalog_says():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == render(), "write it anew with `make docs`"
