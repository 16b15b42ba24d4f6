"""What one run shows, read once: its loss, its evaluation, its speed, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowgauge.observe.store import Run
from narrowgauge.observe.verdict.began import began
from narrowgauge.observe.verdict.converted import converted
from narrowgauge.observe.verdict.gap import QUARTER, Series
from narrowgauge.observe.verdict.types import TwinFacts

WARM_STEPS = 3  # the first steps pay for allocation and autotuning


@dataclass(frozen=True)
class Evidence:
    """One run of a comparison, as the judge sees it. `run` is None if it left nothing readable."""

    name: str
    run: Run | None
    exit_code: int = 0
    error: str = ""

    @property
    def meta(self) -> dict[str, Any]:
        """The run's metadata; empty if there is no run."""
        return dict(self.run.meta) if self.run is not None else {}

    def conversion(self) -> tuple[dict[str, Any], ...]:
        """What became of each linear layer, of all ranks."""
        return converted(self.run.metas) if self.run is not None else ()

    def series(self, name: str) -> Series:
        """One scalar by step; empty if it was never recorded."""
        if self.run is None or name not in self.run.scalar_names:
            return Series(np.zeros(0, np.int64), np.zeros(0))
        table = self.run.scalars(name)
        return Series(np.asarray(table["step"], np.int64), np.asarray(table[name], np.float64))

    @property
    def steps(self) -> int:
        """Optimizer steps made."""
        return int(self.meta.get("steps", 0)) or int(self.series("loss").steps.size)

    def began(self) -> str:
        """Where its numbers stopped being finite, in words; "" where they did not."""
        return began(self.run) if self.run is not None else ""

    def final_loss(self) -> float | None:
        """Mean loss over the last quarter."""
        loss = self.series("loss").values
        return float(np.mean(loss[-max(1, loss.size // QUARTER) :])) if loss.size else None

    def eval_value(self) -> float | None:
        """The last evaluation's loss."""
        values = self.series("eval_loss").values
        return float(values[-1]) if values.size else None

    def step_seconds(self) -> float | None:
        """Median time of an undisturbed step, warm-up left out; None if every step was disturbed, as by recording."""
        seconds, clean = self.series("step_seconds"), self.series("clean")
        if seconds.steps.size == 0:
            return None
        good = np.isin(seconds.steps, clean.steps[clean.values > 0]) & (seconds.steps > WARM_STEPS)
        if not good.any() and clean.steps.size:
            return None
        return float(np.median(seconds.values[good] if good.any() else seconds.values))

    def tokens_per_second(self) -> float | None:
        """Tokens (or samples, for inputs that are no token ids) per second of an undisturbed step."""
        seconds, tokens = self.step_seconds(), self.series("tokens").values
        return float(np.median(tokens)) / seconds if seconds and tokens.size and np.median(tokens) > 0 else None

    def watch_pct(self) -> float | None:
        """By how much longer the run's steps took for being watched, in percent; None where too few were recorded."""
        watch, recorded = self.meta.get("watch", {}), self.series("memory_bytes").steps.size
        took, other = watch.get("recorded_step_seconds"), watch.get("other_step_seconds")
        if not (took and other and self.steps):
            return None
        return max(100.0 * (float(took) / float(other) - 1) * recorded / self.steps, 0.0)

    def twin_facts(self) -> TwinFacts:
        """The facts of a baseline or a noise twin."""
        return TwinFacts(
            name=self.name,
            dtype=str(self.meta.get("baseline_dtype", "unknown")),
            steps=self.steps,
            final_loss=self.final_loss(),
            eval_value=self.eval_value(),
            step_seconds=self.step_seconds(),
            tokens_per_second=self.tokens_per_second(),
            peak_memory_bytes=self.meta.get("peak_memory_bytes"),
            nan_steps=int(self.meta.get("nan_steps", 0)),
            skipped_steps=int(self.meta.get("skipped_steps", 0)),
            exit_code=self.exit_code,
            error=self.error,
            counted=str(self.meta.get("counted") or "tokens"),
        )


def first_difference(a: Evidence, b: Evidence, name: str = "data_digest") -> int | None:
    """The first common step at which two runs had seen different data; None if they agree (or nothing was recorded).

    `name`: the scalar to compare, if it is another one.
    """
    left, right = a.series(name), b.series(name)
    steps = np.intersect1d(left.steps, right.steps)
    differs = left.at(steps) != right.at(steps)
    return int(steps[differs][0]) if differs.any() else None
