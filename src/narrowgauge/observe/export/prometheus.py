"""Prometheus: some fifty gauges, served on a port or written to a file for a collector that reads files.

narrowgauge_loss{run}                            the last step's scalars, whatever their names are
narrowgauge_tokens_so_far{run}                   sums: also of skipped and of non-finite steps (so_far.py)
narrowgauge_sqnr_db_min{run,role}                the last recorded step's tensors: min, median, max
narrowgauge_worst{run,role,metric,site} 1        which site is the worst in that step
narrowgauge_site{run,role,metric,site}           sites that were asked for
"""

from collections.abc import Mapping, Sequence

from prometheus_client import start_http_server, write_to_textfile

from narrowgauge.metrics import by_name
from narrowgauge.observe.export.exporter import Event, Exporter, Look, Point, write
from narrowgauge.observe.export.gauges import Gauges
from narrowgauge.observe.export.so_far import SUMMED, SoFar
from narrowgauge.observe.store import role_of

FILE = "metrics.prom"


class Prometheus(Exporter):
    """Settings: `port` to serve on, `file` to write; without either `metrics.prom` in the run's folder."""

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        """Open the port."""
        port = self.table.get("port")
        self._file = self.table.get("file") or (None if port else self.folder / FILE)
        self._gauges, self._so_far = Gauges(name), SoFar()
        self._gauges.of("up").set(1)
        try:
            self._server = start_http_server(port, registry=self._gauges.registry)[0] if port else None
        except OSError as error:
            raise OSError(f"port {port}: {error.strerror}; give another one.") from error

    def scalars(self, points: Sequence[Point]) -> None:
        """The last step's, and sums over all."""
        for point in points:
            plain = {name: value for name, value in point.values.items() if name not in SUMMED}
            for name, value in ({"step": point.step} | plain | self._so_far.add(point)).items():
                if value is not None:
                    self._gauges.of(name).set(value)
                else:
                    self._gauges.drop(name)

    def look(self, look: Look) -> None:
        """Every number of the look, with labels."""
        self._gauges.of("tensors_step").set(look.step)
        self._gauges.clear("worst")  # one site per role and metric, not all that ever were
        for s in look.summaries:
            for name, value in s.items():
                about = f"{name} over a role's sites. {by_name(s.metric).meaning}"
                self._gauges.of(f"{s.metric}_{name}", about, role=s.role).set(value)
            if s.worst:
                self._gauges.of(
                    "worst", "1 for the site to look at first.", role=s.role, metric=s.metric, site=s.worst
                ).set(1)
        for site, row in look.sites.items():
            for metric, value in row.items():
                self._gauges.of("site", role=role_of(site), metric=metric, site=site).set(value)

    def event(self, event: Event) -> None:
        """Count it."""
        self._gauges.of("events", kind=event.kind).inc()

    def flush(self) -> None:
        """Replace the file."""
        if self._file:
            write(self._file, lambda file: write_to_textfile(file, self._gauges.registry))

    def close(self, status: str) -> None:
        """Say that it is over, and close the port."""
        self._gauges.of("up").set(0)
        self.flush()
        if self._server:
            self._server.shutdown()
            self._server.server_close()
