"""Prometheus: some fifty gauges, served on a port or written to a file for a collector that reads files.

narrowgauge_loss{run}                            the last step's scalars, whatever their names are
narrowgauge_tokens_so_far{run}                   sums: also of skipped and of non-finite steps; none of tokens any more
                                                 once a step had no row (`[watch] scalars = "recorded"`)
narrowgauge_sqnr_db_min{run,role}                the last recorded step's tensors: min, median, max
narrowgauge_worst{run,role,metric,site} 1        which site is the worst in that step
narrowgauge_site{run,role,metric,site}           sites that were asked for
"""

import re
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, start_http_server, write_to_textfile

from narrowgauge.observe.export.exporter import Event, Exporter, Look, Point, write
from narrowgauge.observe.store import role_of

FILE = "metrics.prom"
SUMMED = ("tokens", "skipped", "nonfinite")  # what happens between two scrapes must not be missed


class Prometheus(Exporter):
    """Settings: `port` to serve on, `file` to write; without either `metrics.prom` in the run's folder."""

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        """Open the port."""
        self._run, port = name, self.table.get("port")
        self._file = self.table.get("file") or (None if port else self.folder / FILE)
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._step: int | None = None
        self._all_told = True  # each step had a row
        self._gauge("up").set(1)
        try:
            self._server = start_http_server(port, registry=self._registry)[0] if port else None
        except OSError as error:
            raise OSError(f"port {port}: {error.strerror}; give another one.") from error

    def scalars(self, points: Sequence[Point]) -> None:
        """The last step's, and sums over all."""
        for point in points:
            self._passed(point.step)
            self._gauge("step").set(point.step)
            for name, value in point.values.items():
                if name not in SUMMED:
                    self._gauge(name).set(value)
                elif name != "tokens" or self._all_told:
                    self._gauge(f"{name}_so_far").inc(value)

    def _passed(self, step: int) -> None:
        """A sum of the tokens of some steps looks like a slow program's, and is shown no longer."""
        if self._all_told and self._step is not None and step > self._step + 1:
            self._all_told = False
            if tokens := self._gauges.pop("narrowgauge_tokens_so_far", None):
                self._registry.unregister(tokens)
        self._step = step

    def look(self, look: Look) -> None:
        """Every number of the look, with labels."""
        self._gauge("tensors_step").set(look.step)
        if worst := self._gauges.get("narrowgauge_worst"):
            worst.clear()  # one site per role and metric, not all that ever were
        for s in look.summaries:
            for name, value in s.items():
                self._gauge(f"{s.metric}_{name}", role=s.role).set(value)
            self._gauge("worst", role=s.role, metric=s.metric, site=s.worst).set(1)
        for site, row in look.sites.items():
            for metric, value in row.items():
                self._gauge("site", role=role_of(site), metric=metric, site=site).set(value)

    def event(self, event: Event) -> None:
        """Count it."""
        self._gauge("events", kind=event.kind).inc()

    def flush(self) -> None:
        """Replace the file."""
        if self._file:
            write(self._file, lambda file: write_to_textfile(file, self._registry))

    def close(self, status: str) -> None:
        """Say that it is over, and close the port."""
        self._gauge("up").set(0)
        self.flush()
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _gauge(self, name: str, **labels: str) -> Gauge:
        name = "narrowgauge_" + re.sub(r"\W", "_", name)
        if name not in self._gauges:
            about = f"{name[12:]}, as last recorded."
            self._gauges[name] = Gauge(name, about, ("run", *labels), registry=self._registry)
        return self._gauges[name].labels(run=self._run, **labels)
