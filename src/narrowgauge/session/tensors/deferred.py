"""Scalars that live on the device until the device is done with them: read late, so that no step ever waits.

A step's scalars are stacked into one tensor, copied to pinned memory without waiting, and picked up by a later call
once the copy's event has passed. Those on the host are simply there; taken to the device, they would make it wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.session.tensors.sharded import here

Sink = Callable[[dict[str, float]], None]


def kept(x: Tensor) -> Tensor | float:
    """A scalar as it is now, whatever the program makes of it later: its number if that is on the host, or a copy."""
    if type(x) is Tensor and x.dtype is torch.float32 and x.is_cpu:
        return x.item()  # a quarter of the time
    return x.detach().clone()


class Deferred:
    """A queue of scalar dictionaries on their way from the device to a sink, in order."""

    def __init__(self, longest: int = 64) -> None:
        self._waiting: deque[tuple[list[str], dict[str, float], Tensor | None, Any, Sink]] = deque()
        self._longest = longest

    @property
    def empty(self) -> bool:
        """Whether none is on its way."""
        return not self._waiting

    def put(self, scalars: Mapping[str, float | Tensor], sink: Sink) -> None:
        """Queue one dictionary; tensors must be scalars (0-d), any device and dtype; of a sharded one, what is here."""
        known: dict[str, float] = {}
        on_device: dict[str, Tensor] = {}
        for name, value in scalars.items():
            if type(value) is not float and isinstance(value, Tensor):
                if type(value) is not Tensor:
                    value = here(value.detach())
                elif value.requires_grad:
                    value = value.detach()
                if value.device.type != "cpu":
                    on_device[name] = value
                    continue
            known[name] = float(value)
        if not on_device:
            if not self._waiting:
                sink(known)
                return
            self._waiting.append(([], known, None, None, sink))
        else:
            home = next(iter(on_device.values())).device
            stacked = torch.stack([v.to(home, torch.float64).reshape(()) for v in on_device.values()])
            event = None
            if home.type == "cuda":
                host = torch.empty(stacked.shape, dtype=stacked.dtype, device="cpu", pin_memory=True)
                host.copy_(stacked, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                stacked = host
            self._waiting.append((list(on_device), known, stacked, event, sink))
        self.drain(wait=len(self._waiting) > self._longest)

    def drain(self, *, wait: bool = False) -> None:
        """Hand over what has arrived; with `wait`, everything."""
        while self._waiting:
            names, known, values, event, sink = self._waiting[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._waiting.popleft()
            arrived = {} if values is None else dict(zip(names, values.tolist(), strict=True))
            sink({**known, **arrived})
