"""Scalars that live on the device until the device is done with them: read late, so that no step ever waits.

Those of a step, or of several at once, are stacked into one tensor, copied to pinned memory without waiting, and picked
up by a later call once the copy's event has passed. Those on the host are simply there; taken to the device, they would
make it wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.session.tensors.sharded import here

Sink = Callable[[dict[str, float]], None]


class Row(NamedTuple):
    """A dictionary of scalars (0-d, any device and dtype; of a sharded one what is here), and who takes its numbers.

    `behind` is what has passed before it is given: an event of any device and stream, not only of those of the scalars.
    """

    scalars: Mapping[str, float | Tensor]
    sink: Sink
    behind: torch._C._CudaEventBase | None = None


def kept(x: Tensor) -> Tensor | float:
    """A scalar as it is now, whatever the program makes of it later: its number if that is on the host, or a copy."""
    if type(x) is Tensor and x.dtype is torch.float32 and x.is_cpu:
        return x.item()  # a quarter of the time
    return x.detach().clone()


def _on_host(x: Tensor) -> bool:
    """Whether nobody waits for its number."""
    return x.device.type == "cpu"


class _Kind(NamedTuple):
    """What is stacked together; all but float32 has become float64."""

    device: torch.device
    dtype: torch.dtype


class _Copies:
    """Scalars on their way from devices to the host: of each kind one copy, and of each device one event behind it."""

    def __init__(self) -> None:
        self._scalars: dict[_Kind, list[Tensor]] = {}
        self._numbers: dict[_Kind, list[float]] = {}
        self._hosts: dict[_Kind, Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def add(self, x: Tensor) -> tuple[_Kind, int]:
        """One more, of any type and with one number; its place."""
        x = x if x.dtype is torch.float32 else x.to(torch.float64)
        kind = _Kind(x.device, x.dtype)
        scalars = self._scalars.setdefault(kind, [])
        scalars.append(x if not x.dim() else x.reshape(()))
        return kind, len(scalars) - 1

    def leave(self) -> None:
        """All are there: they begin their way."""
        for kind, scalars in self._scalars.items():
            stacked = torch.stack(scalars)
            if kind.device.type == "cuda":
                self._hosts[kind] = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
                self._hosts[kind].copy_(stacked, non_blocking=True)
            else:
                self._hosts[kind] = stacked
        for device in {kind.device for kind in self._scalars if kind.device.type == "cuda"}:
            self._events.append(torch.cuda.current_stream(device).record_event())  # which need not be of this device
        self._scalars = {}

    def arrived(self, *, wait: bool) -> bool:
        """Whether they are on the host."""
        while self._events and (wait or self._events[-1].query()):
            self._events.pop().synchronize()
        return not (self._events or self._scalars)

    def number(self, kind: _Kind, at: int) -> float:
        """The one at a place."""
        if kind not in self._numbers:
            self._numbers[kind] = self._hosts[kind].tolist()
        return self._numbers[kind][at]


class _Waiting(NamedTuple):
    """One of which some numbers are known, and the others have places among the copies."""

    known: dict[str, float]
    places: dict[str, tuple[_Kind, int]]
    copies: _Copies
    sink: Sink
    behind: torch._C._CudaEventBase | None

    def there(self, *, wait: bool) -> bool:
        """Whether all have arrived, which none has before its copies have left."""
        if wait and self.behind is not None:
            self.behind.synchronize()
        arrived = not self.places or self.copies.arrived(wait=wait)
        return arrived and (self.behind is None or self.behind.query())

    def give(self) -> None:
        """To its sink; all have arrived."""
        arrived = {name: self.copies.number(*place) for name, place in self.places.items()}
        self.sink({**self.known, **arrived})


class Deferred:
    """A queue of scalar dictionaries on their way from the device to a sink, in order.

    Args:
        longest: so many may be on their way; the first of more are waited for.
    """

    def __init__(self, longest: int = 64) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._longest = longest

    @property
    def empty(self) -> bool:
        """Whether none is on its way."""
        return not self._waiting

    def put(self, row: Row) -> None:
        """Queue one."""
        self.put_all([row])

    def put_all(self, rows: Iterable[Row]) -> None:
        """Queue several, whose tensors take their way together."""
        copies = _Copies()
        try:
            for row in rows:
                self._queue(row, copies)
        finally:  # what is wrong with one costs that one
            copies.leave()
        self.drain()

    def _queue(self, row: Row, copies: _Copies) -> None:
        known: dict[str, float] = {}
        places: dict[str, tuple[_Kind, int]] = {}
        for name, value in row.scalars.items():
            if type(value) is not float and isinstance(value, Tensor):
                if type(value) is not Tensor:
                    value = here(value.detach())
                elif value.requires_grad:
                    value = value.detach()
                if not _on_host(value):
                    places[name] = copies.add(value)
                    continue
            known[name] = float(value)
        if not self._waiting and not places and (row.behind is None or row.behind.query()):
            row.sink(known)
        else:
            self._waiting.append(_Waiting(known, places, copies, row.sink, row.behind))

    def drain(self, *, wait: bool = False) -> None:
        """Hand over what has arrived; with `wait`, everything."""
        while self._waiting:
            first, too_many = self._waiting[0], len(self._waiting) > self._longest
            if not first.there(wait=wait or too_many):
                return
            self._waiting.popleft()
            first.give()
