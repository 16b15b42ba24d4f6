"""The reference page of the metrics, written from the catalog so that it can't lag behind it."""

from __future__ import annotations

from narrowgauge.metrics.catalog import CATALOG, Metric
from narrowgauge.metrics.site import OPERAND_ROLES, ROLES

_OPENING = """\
# Metrics

*Generated from `narrowgauge.metrics`; edit the catalog, not this page.*

x is the high-precision tensor, d what its codes stand for (`codes * scale`), n the number of elements. A row
of a run's tensor table is one site (`module:role`) in one step. The columns come in this order and keep their
names.

Non-finite elements are counted and left out of everything else; what compares x with its codes also leaves out
the elements under a scale that is not finite (the mark of a granule that held one). 0/0 is null, read back as
NaN. A perfect copy has an SQNR of infinity. `std` is the population's; `kurtosis` is not the excess.

A tensor of zeros alone has no scale: what a rule gives to nothing (1, or the smallest that there is) and what a delayed
scale kept say nothing of it. Its scale columns are null, and as a microbatch or a rank's part it has no say in them. A
row, tile or block of zeros in a tensor that has other numbers counts, with the scale that it got.

| column | unit | applies to | healthy |
|---|---|---|---|
"""


def render() -> str:
    """The whole of docs/metrics.md."""
    rows = "".join(
        f"| [`{m.name}`](#{m.name}) | {m.unit or '-'} | {_where(m)} | {m.healthy or '-'} |\n" for m in CATALOG.values()
    )
    return _OPENING + rows + "".join(_section(m) for m in CATALOG.values())


def _section(metric: Metric) -> str:
    return (
        f"\n## {metric.name}\n\n{metric.meaning}\n\n"
        f"- Formula: `{metric.formula}`\n"
        f"- Merges: {metric.merge}\n"
        f"- Applies to: {_where(metric)}{metric.needs and f'; {metric.needs}'}\n"
    )


def _where(metric: Metric) -> str:
    if metric.roles == ROLES:
        return "operands and results"
    return "operands" if metric.roles == OPERAND_ROLES else "results"
