"""Sums over all steps, for who looks at a run at times: what happens between two looks must not be missed."""

from __future__ import annotations

from narrowgauge.observe.export.exporter import Point

SUMMED = ("tokens", "skipped", "nonfinite")


class SoFar:
    """Sums of `SUMMED`, each as `NAME_so_far`.

    Once a step had no row, or none that tells (`[watch] scalars`), `tokens` are summed no longer: the sum of those of
    some steps looks like a slow program's. What is skipped or not finite is rare, and each that is known counts.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._step: int | None = None
        self._all = True  # steps have told of their tokens, if any did

    def add(self, point: Point) -> dict[str, float | None]:
        """A further step; returns the sums, None of what is summed no longer."""
        self._all = self._all and (self._step is None or point.step <= self._step + 1)
        self._all = self._all and not ("tokens" in self._sums and "tokens" not in point.values)
        self._step = point.step
        for name in SUMMED:
            if name in point.values:
                self._sums[name] = self._sums.get(name, 0.0) + point.values[name]
        return {
            f"{name}_so_far": value if self._all or name != "tokens" else None for name, value in self._sums.items()
        }
