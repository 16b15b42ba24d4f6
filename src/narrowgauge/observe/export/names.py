"""Which exporters there are, what each needs installed, and which metrics they show.

Names are resolved late: of the trackers' packages only those that were asked for are imported, and only in the process
that exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from narrowgauge.errors import UsageError, nearest
from narrowgauge.observe.export.exporter import Exporter

# Of all metrics those that a person would watch, and what makes a site the worst in each.
METRICS: dict[str, Literal["low", "high", "off one"]] = {
    "amax": "high",
    "std": "high",
    "nan_count": "high",
    "inf_count": "high",
    "underflow_pct": "high",
    "saturation_pct": "high",
    "lost_energy_pct": "high",
    "sqnr_db": "low",
    "p5_col_sqnr_db": "low",
    "gain": "off one",
    "amax_ratio": "high",
    "gemm_sqnr_db": "low",
}
HIDDEN = frozenset({"data_digest"})  # a hash stored as a number


@dataclass(frozen=True)
class _Known:
    adapter: str
    title: str
    packages: tuple[str, ...]


KNOWN = {
    "tensorboard": _Known("tensorboard:TensorBoard", "TensorBoard", ("tensorboard",)),
    "wandb": _Known("wandb:WeightsAndBiases", "Weights & Biases", ("wandb",)),
    "mlflow": _Known("mlflow:MLflow", "MLflow", ("mlflow",)),
    "prometheus": _Known("prometheus:Prometheus", "Prometheus", ("prometheus_client",)),
}


def chosen(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The exporters that the `[export]` table switches on, each with its own table.

    >>> chosen({"tensorboard": True, "wandb": {"mode": "offline"}, "mlflow": False, "sites": ["lm_head"]})
    {'tensorboard': {}, 'wandb': {'mode': 'offline'}}
    """
    tables = {name: value for name, value in settings.items() if name != "sites" and value not in (None, False)}
    return {name: dict(value) if isinstance(value, Mapping) else {} for name, value in tables.items()}


def of_variant(settings: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """The `[export]` table for one run of a comparison: what names a run, or holds its files, tells which run it is.

    >>> of_variant({"wandb": {"name": "nightly"}, "tensorboard": {"dir": "board"}, "mlflow": True}, "current")
    {'wandb': {'name': 'nightly-current'}, 'tensorboard': {'dir': 'board/current'}, 'mlflow': True}
    """
    own = dict(settings)
    for tracker, key, join in (("wandb", "name", "-"), ("tensorboard", "dir", "/")):
        table = own.get(tracker)
        if isinstance(table, Mapping) and table.get(key):
            own[tracker] = {**table, key: f"{table[key]}{join}{variant}"}
    return own


def check(settings: Mapping[str, Any]) -> None:
    """Raise UsageError for an exporter that is unknown, or whose package is not installed, naming the extra."""
    for name in chosen(settings):
        if name not in KNOWN:
            raise UsageError(f"there is no exporter {name!r}; {nearest(name, KNOWN)}")
        missing = [package for package in KNOWN[name].packages if find_spec(package) is None]
        if missing:
            raise UsageError(
                f"[export] {name}: the package {missing[0]} is not installed; install it by "
                f"`pip install 'narrowgauge[{name}]'`, or take {name} out of the settings."
            )


def make(name: str, folder: Path, table: Mapping[str, Any]) -> Exporter:
    """The exporter of that name for the run in `folder`; this imports its package."""
    module, _, kind = KNOWN[name].adapter.partition(":")
    exporter: Exporter = getattr(import_module(f"{__package__}.{module}"), kind)(folder, table)
    return exporter
