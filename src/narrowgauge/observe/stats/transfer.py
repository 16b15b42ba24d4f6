"""A step's packed moments on their way to the host, and the device time that it took to make them.

    device [S * W + R * H] float64  --one asynchronous copy-->  pinned host memory, an event after it

Legend: S = operand sites, W = packed width, R = result sites, H = head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats.guard import Marks


@dataclass(frozen=True)
class Transfer:
    """One step of one device. `host` may be read once `arrived`.

    Args:
        step: which step.
        operands, results: the sites, in the order of their rows.
        host: the copy.
        event: recorded after the copy; None if it was there at once.
        marks: around what the device worked for the watch.
    """

    step: int
    operands: tuple[str, ...]
    results: tuple[str, ...]
    host: Tensor
    event: Any
    marks: Marks

    @classmethod
    def start(
        cls,
        step: int,
        operands: tuple[Sequence[str], Tensor | None],
        results: tuple[Sequence[str], Tensor | None],
        marks: Marks,
    ) -> Transfer:
        """Begin the copy of both tables ([S, W] and [R, H], None if empty)."""
        flat = torch.cat([table.reshape(-1) for _, table in (operands, results) if table is not None])
        event = None
        if flat.is_cuda:
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(flat.device))
        else:
            host = flat.cpu()
        return cls(step, tuple(operands[0]), tuple(results[0]), host, event, marks)

    def arrived(self, wait: bool) -> bool:
        """Whether the copy is there; `wait` makes sure of it."""
        if self.event is not None and wait:
            self.event.synchronize()
        return self.event is None or bool(self.event.query())

    def tables(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The packed moments [S, W] and [R, H]; only once arrived."""
        flat = self.host.numpy()
        cut = len(self.operands) * MOMENTS.width
        return flat[:cut].reshape(-1, MOMENTS.width), flat[cut:].reshape(-1, MOMENTS.head_width)

    def device_seconds(self) -> float:
        """How long the device worked for the watch, as far as events tell; 0 on the CPU. Only once arrived."""
        return float(sum(begin.elapsed_time(end) for begin, end in self.marks)) / 1e3
