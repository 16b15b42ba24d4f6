"""Scalars that live on the device until the device is done with them: read late, so that no step ever waits.

A step's scalars are stacked into one tensor. Of several short steps, these go to pinned memory together, in one copy
that nobody waits for, and are picked up by a later call once the copy's event has passed. Those on the host are read at
once (taken to the device, they would make it wait), and handed over together as well: after a step's own work nothing
of ours is left in the processor's caches, and sixteen lines take little longer than one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.session.tensors.sharded import here

Sink = Callable[[dict[str, float]], None]
TOGETHER = 16  # steps, at most
PATIENCE = 0.25  # seconds that a step's line waits for others, at most, while steps go on


class Row(NamedTuple):
    """One step's scalars: those that are known, and names and values of those that are still on a device."""

    known: dict[str, float]
    names: list[str]
    values: Tensor | None
    sink: Sink


class Deferred:
    """A queue of scalar dictionaries on their way from the device to a sink, in order."""

    def __init__(self, longest: int = 64) -> None:
        self._rows: list[Row] = []
        self._taken = time.perf_counter()
        self._waiting: deque[tuple[list[Row], Tensor | None, Any]] = deque()
        self._longest = longest

    def put(self, scalars: Mapping[str, float | Tensor], sink: Sink) -> None:
        """Queue one dictionary; tensors must be scalars (0-d), any device and dtype; of a sharded one, what is here."""
        known: dict[str, float] = {}
        on_device: dict[str, Tensor] = {}
        for name, value in scalars.items():
            if isinstance(value, Tensor):
                value = here(value.detach())
                if value.device.type != "cpu":
                    on_device[name] = value
                    continue
            known[name] = float(value)
        self._rows.append(Row(known, list(on_device), _stacked(on_device), sink))
        if len(self._rows) >= TOGETHER or time.perf_counter() - self._taken >= PATIENCE:
            self.drain(wait=len(self._waiting) > self._longest)

    def drain(self, *, wait: bool = False) -> None:
        """Send what was put and hand over what has arrived; with `wait`, everything."""
        self._send()
        while self._waiting:
            rows, values, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._waiting.popleft()
            arrived = iter([] if values is None else values.tolist())
            for row in rows:
                row.sink({**row.known, **{name: next(arrived) for name in row.names}})

    def _send(self) -> None:
        """What was put since the last time goes on its way to the host."""
        self._taken = time.perf_counter()
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        parts = [row.values for row in rows if row.values is not None]
        if not parts:
            self._waiting.append((rows, None, None))
            return
        home, event = parts[-1].device, None
        values = parts[0] if len(parts) == 1 else torch.cat([part.to(home) for part in parts])
        if home.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            values = host
        self._waiting.append((rows, values, event))


def _stacked(scalars: dict[str, Tensor]) -> Tensor | None:
    """Their values now, float64, on the device of the first; None if there are none."""
    if not scalars:
        return None
    home = next(iter(scalars.values())).device
    return torch.stack([value.to(home, torch.float64).reshape(()) for value in scalars.values()])
