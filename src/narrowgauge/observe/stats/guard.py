"""Around everything that the watch does: timed, and with its errors kept from the training program.

A class instead of a generator, because it is entered some hundred times a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

Marks = list[tuple[Any, Any]]  # (begin, end) pairs of CUDA events around the watch's own work


class Guard:
    """Runs what is inside; an exception ends it early and goes to `failed`, and nothing else happens.

    Args:
        spent: told the host's seconds.
        failed: told an exception.
        device, marks: on a GPU, where events around the work done inside are left.
    """

    __slots__ = ("_began", "_device", "_event", "_failed", "_marks", "_spent")

    def __init__(
        self,
        spent: Callable[[float], None],
        failed: Callable[[Exception], None],
        device: torch.device | None = None,
        marks: Marks | None = None,
    ) -> None:
        self._spent, self._failed = spent, failed
        self._device = device if device is not None and device.type == "cuda" else None
        self._marks = marks

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._event = None if self._device is None else self._record()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if self._event is not None and self._marks is not None and error is None:
            self._marks.append((self._event, self._record()))
        ours = isinstance(error, Exception)  # not what asks the program to stop
        if ours:
            self._failed(error)  # type: ignore[arg-type]
        self._spent(time.perf_counter() - self._began)
        return ours

    def _record(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
