"""Every metric: its name, unit, meaning, formula, how it merges, where it applies and which way is healthy.

x: the high-precision tensor, d: what its codes stand for (codes * scale), n: element count.

The names and their order are frozen: stored runs have these columns. A new metric goes to the end.
`docs/metrics.md` is generated from this file.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.errors import UsageError, nearest
from narrowgauge.metrics.bins import (
    EXPONENT_BINS,
    EXPONENT_LOW,
    RANGE_BINS,
    SQNR_HIGH,
    SQNR_LOW,
    SQNR_WIDTH,
)
from narrowgauge.metrics.site import OPERAND_ROLES, RESULT_ROLES, ROLES


@dataclass(frozen=True)
class Metric:
    """One column of a run's tensor table.

    Args:
        name: the frozen column name.
        unit: "" for a pure number; "x" for the tensor's own unit.
        meaning: one sentence.
        formula: in terms of x, d, n, the scale and the merged sums.
        merge: how microbatches, tiles and ranks become one number.
        roles: the roles that it applies to; NaN elsewhere.
        healthy: which way is good, in a few words.
        kind: "float", "count" (int64) or "histogram" (a list of int64).
        bins: how many bins a histogram has.
        needs: what a site must be, beside its role, to have it; "" for all.
    """

    name: str
    unit: str
    meaning: str
    formula: str
    merge: str
    roles: tuple[str, ...] = OPERAND_ROLES
    healthy: str = ""
    kind: str = "float"
    bins: int = 0
    needs: str = ""

    @property
    def is_histogram(self) -> bool:
        """Whether a value is a list of counts."""
        return self.kind == "histogram"


_SUMS = "from merged sums"
_CONVERTED = "only converted layers have results: `--convert`"
_MOMENTS = "from merged central moments"
_SQNR_HISTOGRAM = f"histograms add up, {SQNR_WIDTH:g} dB bins, {SQNR_LOW:g} to {SQNR_HIGH:g} dB, then -inf, inf"

_METRICS = (
    Metric(
        "numel",
        "elements",
        "How many elements were seen, over all microbatches of the step; a weight is seen once.",
        "n",
        "sum",
        ROLES,
        "",
        "count",
    ),
    Metric(
        "amax",
        "x",
        "The largest magnitude.",
        "max abs(x)",
        "max",
        ROLES,
        "steady; a jump hurts delayed scaling",
    ),
    Metric(
        "amin",
        "x",
        "The smallest magnitude that is not zero.",
        "min abs(x) over x != 0",
        "min",
        OPERAND_ROLES,
        "log2(amax/amin) within the format's range",
    ),
    Metric("mean", "x", "The mean.", "sum x / n", _MOMENTS, ROLES, "near 0"),
    Metric(
        "std",
        "x",
        "The population's standard deviation.",
        "sqrt(sum (x - mean)^2 / n)",
        _MOMENTS,
        ROLES,
        "steady",
    ),
    Metric("l2", "x", "The Euclidean norm.", "sqrt(sum x^2)", _MOMENTS, ROLES, "steady"),
    Metric(
        "nan_count",
        "elements",
        "Elements that are NaN; they are left out of everything else.",
        "#(x is NaN)",
        "sum",
        ROLES,
        "0",
        "count",
    ),
    Metric(
        "inf_count",
        "elements",
        "Elements that are infinite; they are left out of everything else.",
        "#(abs(x) = inf)",
        "sum",
        ROLES,
        "0",
        "count",
    ),
    Metric(
        "underflow_pct",
        "%",
        "Elements that became zero though they were not.",
        "100 #(x != 0 and code is +-0) / n",
        _SUMS,
        OPERAND_ROLES,
        "low, but it is the lost energy that harms",
    ),
    Metric(
        "saturation_pct",
        "%",
        "Elements beyond the format's largest number.",
        "100 #(abs(x) * inv_scale > fp8max * (1 + 2^-20)) / n",
        _SUMS,
        OPERAND_ROLES,
        "0; above 0.1 look, above 1 act",
    ),
    Metric("mse", "x^2", "The mean squared quantization error.", "mean((x - d)^2)", _SUMS, OPERAND_ROLES, "low"),
    Metric(
        "sqnr_db",
        "dB",
        "Signal to quantization noise over the whole tensor; blind to what a dominating outlier hides.",
        "10 log10(sum x^2 / sum (x - d)^2)",
        _SUMS,
        OPERAND_ROLES,
        "31.5 for E4M3, 25.6 for E5M2",
    ),
    Metric(
        "cosine",
        "",
        "Direction kept; blind to a wrong gain.",
        "<x,d> / (norm(x) norm(d))",
        _SUMS,
        OPERAND_ROLES,
        "above 0.9965",
    ),
    Metric(
        "gain",
        "",
        "Length kept: sees a doubled or stale scale, which the cosine does not.",
        "<x,d> / <x,x>",
        _SUMS,
        OPERAND_ROLES,
        "1, within 3%",
    ),
    Metric(
        "lost_energy_pct",
        "%",
        "The share of the squared norm that flushed elements carried.",
        "100 sum x^2 over flushed / sum x^2",
        _SUMS,
        OPERAND_ROLES,
        "near 0",
    ),
    Metric(
        "p5_row_sqnr_db",
        "dB",
        "SQNR that 95% of the rows exceed: sees an outlier token.",
        "5th percentile over rows of 10 log10(sum x^2 / sum (x - d)^2)",
        _SQNR_HISTOGRAM,
        OPERAND_ROLES,
        "above 20",
    ),
    Metric(
        "p5_col_sqnr_db",
        "dB",
        "SQNR that 95% of the columns exceed: sees an outlier channel.",
        "5th percentile over columns, each column's sums over the sampled rows of all microbatches",
        _SQNR_HISTOGRAM,
        OPERAND_ROLES,
        "above 20",
    ),
    Metric(
        "kurtosis",
        "",
        "The fourth standardized moment (a Gaussian has 3): its growth announces outliers.",
        "n sum (x - mean)^4 / (sum (x - mean)^2)^2, over the sampled rows",
        _MOMENTS,
        OPERAND_ROLES,
        "not growing",
    ),
    Metric(
        "exponent_histogram",
        "elements",
        "Elements per binade, over the sampled rows: answers `what if E5M2` with no rerun.",
        f"bin 0: x = 0; bin i: floor(log2 abs(x)) = i - {1 - EXPONENT_LOW}; open ends; the sum is the sample",
        "sum",
        OPERAND_ROLES,
        "inside the format's range",
        "histogram",
        EXPONENT_BINS,
    ),
    Metric(
        "block_range_histogram",
        "elements",
        "Binades below the own block's amax, over the sampled rows: answers `what if blockwise`.",
        "bin i: floor(log2(amax of the 1x128 block / abs(x))) = i; last open; without zeros and what lies 2^128 below",
        "sum",
        OPERAND_ROLES,
        "few beyond 15 for E4M3",
        "histogram",
        RANGE_BINS,
    ),
    Metric("scale_min", "x/code", "The smallest scale.", "min scale", "min", OPERAND_ROLES, "steady"),
    Metric("scale_max", "x/code", "The largest scale.", "max scale", "max", OPERAND_ROLES, "steady"),
    Metric(
        "scale_std",
        "x/code",
        "The scales' spread, each scale counted once, whatever it covers.",
        "population std of scale",
        _MOMENTS,
        OPERAND_ROLES,
        "0 for one scale per tensor",
    ),
    Metric(
        "amax_ratio",
        "",
        "How far the tensor left the range that its delayed scale assumed; what holds Inf or NaN has no say in it.",
        "amax now / amax that the delayed scale assumed",
        "max",
        OPERAND_ROLES,
        "below 2, above 2^-12",
        needs="only a scale from earlier steps has it: a delayed or static recipe",
    ),
    Metric(
        "gemm_gain",
        "",
        "Gemm check: length kept by the product, against float32 from high-precision operands.",
        "<want,got> / <want,want>",
        _SUMS,
        RESULT_ROLES,
        "1, within 3%",
        needs=_CONVERTED,
    ),
    Metric(
        "gemm_cosine",
        "",
        "Gemm check: direction kept by the product.",
        "<want,got> / (norm(want) norm(got))",
        _SUMS,
        RESULT_ROLES,
        "above 0.998",
        needs=_CONVERTED,
    ),
    Metric(
        "gemm_sqnr_db",
        "dB",
        "Gemm check: signal to noise of the product.",
        "10 log10(sum want^2 / sum (want - got)^2)",
        _SUMS,
        RESULT_ROLES,
        "28.5 for E4M3, 24.6 where an operand is E5M2",
        needs=_CONVERTED,
    ),
)

CATALOG: dict[str, Metric] = {metric.name: metric for metric in _METRICS}
COLUMNS: tuple[str, ...] = tuple(CATALOG)
OPERAND_COLUMNS: tuple[str, ...] = COLUMNS[: COLUMNS.index("gemm_gain")]
RESULT_COLUMNS: tuple[str, ...] = tuple(m.name for m in _METRICS if set(RESULT_ROLES) <= set(m.roles))
HISTOGRAMS: tuple[str, ...] = tuple(m.name for m in _METRICS if m.is_histogram)


def by_name(name: str) -> Metric:
    """The metric of that name.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    if name not in CATALOG:
        raise UsageError(f"there is no metric {name!r}; {nearest(name, CATALOG)}")
    return CATALOG[name]
