"""Gauges of one run for Prometheus, made when they are first asked for."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Gauge


class Gauges:
    """Gauges by their names without `narrowgauge_`, in a registry of their own; `run` is a label of each."""

    def __init__(self, run: str) -> None:
        self.registry, self._run = CollectorRegistry(), run
        self._made: dict[str, Gauge] = {}

    def of(self, name: str, about: str = "", **labels: str) -> Gauge:
        """The gauge of this name, with these labels; `about` says what it is, where the name does not."""
        name = re.sub(r"\W", "_", name)
        if name not in self._made:
            told = about or f"{name}, as last recorded."
            self._made[name] = Gauge(f"narrowgauge_{name}", told, ("run", *labels), registry=self.registry)
        return self._made[name].labels(run=self._run, **labels)

    def clear(self, name: str) -> None:
        """Forget what labels it has had."""
        if known := self._made.get(name):
            known.clear()

    def drop(self, name: str) -> None:
        """It is shown no longer."""
        if known := self._made.pop(name, None):
            self.registry.unregister(known)
