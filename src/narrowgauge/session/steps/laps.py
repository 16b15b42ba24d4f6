"""Seconds from step to step: host time on a CPU, event time on a GPU (read when it is there).

A lap ends between two of the program's steps, where each function costs microseconds whatever it does: torch's own
`Event` and `current_stream` are a dozen of them, so events are made and recorded by what these call in the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from narrowgauge.session.steps.line import Event, Events

# A torch without CUDA has neither, and asks for neither.
_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_cuda = torch.cuda  # whose `is_initialized` is a function more; a child of a fork hears nothing


class Laps:
    """Those of one program; `last`: when the last one ended, by `time.perf_counter`."""

    def __init__(self) -> None:
        self.away = 0.0  # of the lap, so many seconds were for something else
        self.ending = 0.0  # and so many for what the step before had recorded
        self.last = time.perf_counter()
        self._before: Event | None = None
        self._stream: tuple[int, int, torch.cuda.Stream] | None = None  # of the last event: device, address, itself
        self.pair: Events = None  # of the last lap, until somebody takes them

    def lap(self) -> float:
        """Host seconds since the last lap, less what was `away` or `ending`."""
        now = time.perf_counter()
        seconds, self.last = now - self.last - self.away - self.ending, now
        self.away = self.ending = 0.0
        if _cuda._initialized:
            device, stream = _device(), self._stream
            address = _raw_stream(device)
            if stream is None or stream[0] != device or stream[1] != address:
                self._stream = stream = device, address, torch.cuda.current_stream()
            event = Event(enable_timing=True)
            event.record(stream[2])
            self.pair = (self._before, event) if self._before is not None else None
            self._before = event
        return max(seconds, 0.0)

    def hand_over(self) -> None:
        """Another thread laps from now on: events of two devices have no time between them."""
        if self._before is not None and self._before.device != torch.device("cuda", torch.cuda.current_device()):
            self._before = None

    def events(self) -> Events:
        """The two device events of the last lap, if there were any."""
        pair, self.pair = self.pair, None
        return pair
