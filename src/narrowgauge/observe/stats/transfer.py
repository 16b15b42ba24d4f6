"""A step's packed moments on their way to the host, and the device time that it took to make them.

    device [S * W + R * H] float64  --one asynchronous copy-->  pinned host memory, an event after it

Legend: S = operand sites, W = packed width, R = result sites, H = head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats.guard import Marks, milliseconds


@dataclass(frozen=True)
class Packed:
    """What a step left on one device, still there.

    Args:
        step: which step.
        operands, results: the sites and their tables [S, W] and [R, H], None if empty.
        marks: around what the device worked for the watch.
        columns: further columns for the rows, each [S] for operands and [R] for results.
        by: whose rows they are of several that looked: a recipe's name; "" are the run's own.
    """

    step: int
    operands: tuple[Sequence[str], Tensor | None]
    results: tuple[Sequence[str], Tensor | None]
    marks: Marks = field(default_factory=list)
    columns: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = field(default_factory=dict)
    by: str = ""

    def flat(self) -> Tensor:
        """Both tables as one vector; at least one must be there."""
        return torch.cat([table.reshape(-1) for _, table in (self.operands, self.results) if table is not None])


@dataclass(frozen=True)
class HostCopy:
    """A tensor on its way to the host, where it may be read once `arrived`; `event` is None if it was there at once."""

    host: Tensor
    event: Any = None

    @classmethod
    def start(cls, x: Tensor) -> HostCopy:
        """Begin the copy, in the current stream of x's device."""
        if not x.is_cuda:
            return cls(x.cpu())
        host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        host.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(x.device))
        return cls(host, event)

    def arrived(self, wait: bool) -> bool:
        """Whether the copy is there; `wait` makes sure of it."""
        if self.event is not None and wait:
            self.event.synchronize()
        return self.event is None or bool(self.event.query())


class Transfer:
    """One step of one device on its way to the host."""

    def __init__(self, packed: Packed) -> None:
        self.step, self.marks = packed.step, packed.marks
        self.operands, self.results = tuple(packed.operands[0]), tuple(packed.results[0])
        self.columns = packed.columns
        both = packed.operands[1], packed.results[1]
        self._here: list[npt.NDArray[np.float64]] | None = None
        if all(table is None or table.is_cpu for table in both):  # nothing has to be copied
            widths = MOMENTS.width, MOMENTS.head_width
            self._here = [
                np.empty((0, width)) if table is None else table.numpy()
                for table, width in zip(both, widths, strict=True)
            ]
        else:
            self._copy = HostCopy.start(packed.flat())

    def arrived(self, wait: bool) -> bool:
        """Whether the copy is there; `wait` makes sure of it."""
        return self._here is not None or self._copy.arrived(wait)

    def tables(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The packed moments [S, W] and [R, H]; only once arrived."""
        if self._here is not None:
            return self._here[0], self._here[1]
        flat = self._copy.host.numpy()
        if self._copy.event is not None:  # rows wait for their writer; pinned memory is scarce
            flat = flat.copy()
        cut = len(self.operands) * MOMENTS.width
        return flat[:cut].reshape(-1, MOMENTS.width), flat[cut:].reshape(-1, MOMENTS.head_width)

    def device_seconds(self) -> float:
        """How long the device worked for the watch, as far as events tell; 0 on the CPU. Only once arrived."""
        return milliseconds(self.marks) / 1e3
