"""What every statistic is called, means, and how two of them become one. No torch here."""

from narrowgauge.metrics.bins import exponent_of_bin
from narrowgauge.metrics.catalog import (
    CATALOG,
    COLUMNS,
    HISTOGRAMS,
    OPERAND_COLUMNS,
    RESULT_COLUMNS,
    Metric,
    by_name,
)
from narrowgauge.metrics.finalize import finalize
from narrowgauge.metrics.layout import MOMENTS, Layout, Slot
from narrowgauge.metrics.merge import merge
from narrowgauge.metrics.site import OPERAND_ROLES, RESULT_ROLES, ROLES, Site

__all__ = [
    "CATALOG",
    "COLUMNS",
    "HISTOGRAMS",
    "MOMENTS",
    "OPERAND_COLUMNS",
    "OPERAND_ROLES",
    "RESULT_COLUMNS",
    "RESULT_ROLES",
    "ROLES",
    "Layout",
    "Metric",
    "Site",
    "Slot",
    "by_name",
    "exponent_of_bin",
    "finalize",
    "merge",
]
