"""A run's numbers in the tracker that a team already looks at, while the run is written.

    trains                        on disk               a process of its own, started by `narrowgauge run`
    writer -> Parquet segments  ->  run folder  ->  Tail -> Follower -> TensorBoard | W&B | MLflow | Prometheus

The run on disk is the queue. So nothing of a tracker is imported, patched, started or waited for in the program that
trains; a tracker that is slow reads later; one that fails is told once and dropped; and what waits costs no memory.
"""

from narrowgauge.observe.export.exporter import Event, Exporter, Look, Point, Summary
from narrowgauge.observe.export.names import check

__all__ = ["Event", "Exporter", "Look", "Point", "Summary", "check"]
