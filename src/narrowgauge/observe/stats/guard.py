"""Around everything that the watch does: timed, and with its errors kept from the training program.

A class instead of a generator, because it is entered some hundred times a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

# CUDA events around the watch's own work, begin and end, and how many times as much they stand for.
Marks = list[tuple[Any, Any, int]]


def milliseconds(marks: Marks) -> float:
    """What lies between events that the device has passed."""
    return float(sum(times * begin.elapsed_time(end) for begin, end, times in marks))


class Guard:
    """Runs what is inside; an exception ends it early and goes to `failed`, and nothing else happens.

    Args:
        spent: told the host's seconds.
        failed: told an exception.
        device, marks: on a GPU, where events around the work done inside are left.
        times: how many times as much this work stands for.
    """

    __slots__ = ("_began", "_device", "_event", "_failed", "_marks", "_spent", "_times")

    def __init__(
        self,
        spent: Callable[[float], None],
        failed: Callable[[Exception], None],
        device: torch.device | None = None,
        marks: Marks | None = None,
        times: int = 1,
    ) -> None:
        self._spent, self._failed = spent, failed
        self._device = device if device is not None and device.type == "cuda" else None
        self._marks, self._times = marks, times

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._event = None if self._device is None else self._record()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if self._event is not None and self._marks is not None and error is None:
            self._marks.append((self._event, self._record(), self._times))
        ours = isinstance(error, Exception)  # not what asks the program to stop
        if ours:
            self._failed(error)  # type: ignore[arg-type]
        self._spent(time.perf_counter() - self._began)
        return ours

    def _record(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
