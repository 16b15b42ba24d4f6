"""Weights & Biases: a run of its own, beside whatever run the program itself may have.

Steps are our own column, not W&B's counter, which could not go back for tensors that arrive after later scalars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import wandb

from narrowgauge.observe.export.exporter import Event, Exporter, Look, Point


class WeightsAndBiases(Exporter):
    """Settings: `project`, `name`, `mode`, as in `wandb.init`; its files lie in the run's folder."""

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        """Start the run; nothing of this machine is collected but what `facts` says."""
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
        )
        given = {"name": name, "project": "narrowgauge", **self.table}
        self._run = wandb.init(dir=str(self.folder), config=dict(facts), settings=quiet, **given)
        self._run.define_metric("*", step_metric="step")

    def scalars(self, points: Sequence[Point]) -> None:
        """One row per step."""
        for point in points:
            self._run.log({"step": point.step, **{f"run/{name}": value for name, value in point.values.items()}})

    def look(self, look: Look) -> None:
        """One row; the worst sites are in the run's summary."""
        self._run.log({"step": look.step, **{f"tensors/{name}": value for name, value in look.numbers().items()}})
        self._run.summary.update({f"worst/{name}": site for name, site in look.worst().items() if site})

    def event(self, event: Event) -> None:
        """A row with the event's sentence."""
        self._run.log({"step": event.step, f"events/{event.kind}": event.line()})

    def close(self, status: str) -> None:
        """Finish the run, and have it on disk, whatever other trackers come to."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("complete", "stopped") else 1)
        wandb.teardown()  # waits for W&B's own process, which writes the file
