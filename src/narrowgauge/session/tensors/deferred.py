"""Scalars that live on the device until the device is done with them: read late, so that no step ever waits.

Those of one or several steps are stacked into one tensor, copied to pinned memory without waiting, and picked up by a
later call once the copy's event has passed. Those on the host are simply there; taken to the device, they would make it
wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.session.tensors.sharded import here

Sink = Callable[[dict[str, float]], None]


class _Row(NamedTuple):
    """What is known of it; where in `values` the rest will be, by name, once the event has passed."""

    known: dict[str, float]
    places: dict[str, int]
    values: Tensor | None
    event: Any
    sink: Sink


class Deferred:
    """A queue of scalar dictionaries on their way from the device to a sink, in order."""

    def __init__(self, longest: int = 64) -> None:
        self._waiting: deque[_Row] = deque()
        self._longest = longest

    def put(self, scalars: Mapping[str, float | Tensor], sink: Sink) -> None:
        """Queue one dictionary; tensors must be scalars (0-d), any device and dtype; of a sharded one, what is here."""
        self.put_all([(scalars, sink)])

    def put_all(self, rows: Iterable[tuple[Mapping[str, float | Tensor], Sink]]) -> None:
        """Queue several, whose tensors are copied together."""
        parted = [(*_parted(scalars), sink) for scalars, sink in rows]
        on_device = [x for _, there, _ in parted for x in there.values()]
        if not on_device and not self._waiting:
            for known, _, sink in parted:
                sink(known)
            return
        values, event, places = _copied(on_device) if on_device else (None, None, [])
        place = iter(places)
        for known, there, sink in parted:
            self._waiting.append(_Row(known, dict(zip(there, place, strict=False)), values, event, sink))
        self.drain(wait=len(self._waiting) > self._longest)

    def drain(self, *, wait: bool = False) -> None:
        """Hand over what has arrived; with `wait`, everything."""
        arrived, numbers = None, []
        while self._waiting:
            known, places, values, event, sink = self._waiting[0]
            if places and values is not arrived:
                if event is not None and not event.query():
                    if not wait:
                        return
                    event.synchronize()
                assert values is not None
                arrived, numbers = values, values.tolist()
            self._waiting.popleft()
            sink({**known, **{name: numbers[place] for name, place in places.items()}})


def _parted(scalars: Mapping[str, float | Tensor]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """What is known, and what a device has."""
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
    return known, on_device


def _copied(scalars: Sequence[Tensor]) -> tuple[Tensor, Any, list[int]]:
    """Float64 [N] on its way to the host, what has to pass before it can be read, and the place of each scalar in it.

    One launch for each kind of numbers, of which most are of two or three.
    """
    home, kinds = scalars[0].device, dict[torch.dtype, list[int]]()
    for number, x in enumerate(scalars):
        kinds.setdefault(x.dtype, []).append(number)
    rows = [torch.stack([scalars[number].to(home).reshape(()) for number in kind]) for kind in kinds.values()]
    stacked = torch.cat([row.to(torch.float64) for row in rows])
    order = [number for kind in kinds.values() for number in kind]
    places = sorted(range(len(order)), key=order.__getitem__)
    if home.type != "cuda":
        return stacked, None, places
    host = torch.empty(stacked.shape, dtype=stacked.dtype, device="cpu", pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event, places
