"""Rows of a step that are still packed moments. The writer's thread makes metrics of them, of many steps at once.

One step's would take ten times as long, and on the thread that trains.

Legend: S = sites of a step, W = packed width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from narrowgauge.metrics import finalize
from narrowgauge.observe.store.segments import Array, Batch

ROWS = 1024  # that are finalized together: what is made of them on the way stays in a core's cache


@dataclass(frozen=True)
class Moments:
    """What was counted in one step.

    Args:
        step: which one.
        sites: [S] names.
        table: [S, W] packed moments, or [S, head width] of results.
        names: the metrics to make of them.
        further: columns that are ready, [S] each.
    """

    step: int
    sites: tuple[str, ...]
    table: Array
    names: tuple[str, ...]
    further: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        return int(self.table.nbytes)


def finished(rows: Sequence[Batch | Moments]) -> list[Batch]:
    """All of them as batches."""
    alike: dict[tuple[tuple[str, ...], int], list[Moments]] = {}
    for each in rows:
        if isinstance(each, Moments):
            alike.setdefault((each.names, each.table.shape[1]), []).append(each)
    ready = [each for each in rows if isinstance(each, Batch)]
    return ready + [batch for steps in alike.values() for batch in _finished(steps)]


def _finished(steps: Sequence[Moments]) -> Iterator[Batch]:
    """Those of the same metrics and width."""
    group: list[Moments] = []
    waiting = 0
    for each in steps:
        group.append(each)
        waiting += len(each.sites)
        if waiting >= ROWS or each is steps[-1]:
            columns = finalize(np.concatenate([one.table for one in group]), columns=group[0].names)
            end = 0
            for one in group:
                begin, end = end, end + len(one.sites)
                own = {name: values[begin:end] for name, values in columns.items()}
                yield Batch.of(one.step, one.sites, {**own, **one.further})
            group, waiting = [], 0
