"""Recorded steps on their way: from a device to the host, and from there to a writer, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from narrowgauge.metrics import OPERAND_COLUMNS, RESULT_COLUMNS, finalize
from narrowgauge.observe.stats.transfer import Packed, Transfer


class Writer(Protocol):
    """What a Collector needs of a `RunWriter`."""

    def add_tensors(self, step: int, sites: Sequence[str], columns: dict[str, Any]) -> None:
        """Record one row per site."""
        ...

    def add_event(self, step: int, kind: str, message: str, site: str | None = None, **data: Any) -> None:
        """Record something that happened."""
        ...


class Arriving:
    """What recorded steps have left, until a writer has it."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[Transfer, Writer]] = deque()

    def __bool__(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._transfers)

    def start(self, packed: Sequence[Packed], writer: Writer) -> None:
        """Start the way to the host."""
        self._transfers += [(Transfer(each), writer) for each in packed]

    def hand_over(self, wait: bool) -> float:
        """Give every step that has arrived to its writer; the seconds that the device has spent on them."""
        seconds = 0.0
        while self._transfers and self._transfers[0][0].arrived(wait):
            transfer, writer = self._transfers.popleft()
            seconds += transfer.device_seconds()
            operands, results = transfer.tables()
            kinds = (transfer.operands, operands, OPERAND_COLUMNS), (transfer.results, results, RESULT_COLUMNS)
            for kind, (sites, table, names) in enumerate(kinds):
                if sites:
                    further = {name: both[kind] for name, both in transfer.columns.items()}
                    _write(writer, transfer.step, sites, table, names, further)
        return seconds


def _write(
    writer: Writer,
    step: int,
    sites: Sequence[str],
    table: npt.NDArray[np.float64],
    names: tuple[str, ...],
    further: Mapping[str, Any],
) -> None:
    later = getattr(writer, "add_moments", None)  # where there is a thread that finalizes
    if later is None:
        writer.add_tensors(step, sites, {**finalize(table, columns=names), **further})
    else:
        later(step, sites, table, names, further)
