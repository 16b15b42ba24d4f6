"""The shortest way of a tensor that lies in memory as the one of its site before did: what was asked then is known.

    here     on the CPU: to the compiled walk
    there    on a GPU: to the launches that filled the look of the step before

Of a recorded step's time most is not counting but finding out, tensor by tensor, what is to be counted and how; and a
program shows the same ones in each of them. Each way is one function, though it asks what the whole way asks of
several: between a program's own operations nothing of ours is in the processor's caches, and a function that is called
takes as long as many numbers.
"""

from __future__ import annotations

import threading
import time
from _thread import RLock
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from narrowgauge.observe.stats import host, team
from narrowgauge.observe.stats.held import TIMED, Held, Lies

if TYPE_CHECKING:
    from narrowgauge.compute.kernels import Given
    from narrowgauge.compute.recipes import Operand

Again = Callable[[Tensor, "Operand", "Given | None"], bool]
Timed = Callable[[str, torch.device, Held], AbstractContextManager[object]]

_CPU = torch.device("cpu")


@dataclass(eq=False, slots=True)
class Gate:
    """What is wanted of tensors that lie as those before them did.

    Attributes:
        paused: nothing is, for the time being.
        asked: more than that they are counted, in the open step.
    """

    paused: bool = False
    asked: bool = False


OPEN = Gate()


@dataclass(eq=False, slots=True)
class Watched:
    """The open step, and what watching cost so far.

    Attributes:
        failed: told of a site and of what went wrong with it.
        open: whether there is one.
        held: what each device holds of it.
        seconds: as `Collector.seconds`.
        on_gpu: whether anything was watched on a GPU: then the host's time counts no more.
        lock: of what is counted and of `seconds`: on a GPU, backward runs in a thread of its own. A signal that comes
            while it is held may end the run in the same thread.
    """

    failed: Callable[[str | None, Exception], None]
    open: bool = False
    held: dict[torch.device, Held] = field(default_factory=dict)
    seconds: float = 0.0
    on_gpu: bool = False
    lock: RLock = field(default_factory=threading.RLock)


def here(watched: Watched, gate: Gate, site: str, once: bool, came: Tensor, way: host.AsBefore, rule: Operand) -> Again:
    """For tensors of a site that lie as `came` does, without gaps on the CPU; `way` is of its matrix by the rule.

    Rules are told apart as objects: a layer's own is never the recipe's.
    """
    kind, shape, dtype = type(came), came.shape, came.dtype
    walk, asked, limits, size, nbytes, columns, shared = way

    def again(x: Tensor, operand: Operand, given: Given | None) -> bool:
        if gate.paused:
            return True
        held = watched.held.get(_CPU)
        if held is None or not watched.open or gate.asked or given is not None or operand is not rule:
            return False
        if type(x) is not kind or x.dtype is not dtype or not x.is_cpu or x.layout is not torch.strided or x.is_nested:
            return False
        if x.shape != shape or not x.is_contiguous() or x.is_neg():
            return False
        if once and site in held.weights:
            return True
        began = time.perf_counter()
        try:
            place = x.data_ptr()
            if not place or x.untyped_storage().nbytes() < x.storage_offset() * x.itemsize + nbytes:
                return False
            vector, sums = held.packer.room(), np.zeros((2, columns))
            if shared:
                team.settle()
            if not walk(place, held.turn, asked, limits, vector, sums):
                return False
            vector[host.NUMEL] = size
            with held.lock:
                held.packer.add_counted(site, host.Counted(vector, sums))
        except Exception as error:
            watched.failed(site, error)
            return True
        finally:
            if not watched.on_gpu:
                with watched.lock:
                    watched.seconds += time.perf_counter() - began
        if once:
            held.weights.add(site)
        return True

    return again


class _Alike(NamedTuple):
    """How tensors lie on a GPU, and what a look is asked for of their matrix."""

    kind: type[Tensor]
    shape: torch.Size
    dtype: torch.dtype
    lies: Lies
    rule: Operand


@lru_cache(256)
def _one(alike: _Alike, rule: int) -> _Alike:
    """The same object for the same; `rule` is the id of its rule, of which another may say the same."""
    return alike


def there(
    watched: Watched,
    gate: Gate,
    site: str,
    once: bool,
    came: Tensor,
    lies: Lies,
    rule: Operand,
    timed: Timed,
) -> Again:
    """For tensors of a site that lie as `came` does, without gaps on a GPU.

    `lies` is what a look is asked for of its matrix by the rule, and how that lies in memory. What is the same for many
    sites is one object for all: a program's operations leave little of ours in the processor's caches.
    """
    alike = _one(_Alike(type(came), came.shape, came.dtype, lies, rule), id(rule))

    def again(x: Tensor, operand: Operand, given: Given | None) -> bool:
        if gate.paused:
            return True
        kind, shape, dtype, before, known = alike
        device = x.device
        held = watched.held.get(device)
        if held is None or not watched.open or gate.asked or operand is not known:
            return False
        if device.index != torch._C._cuda_getDevice() or type(x) is not kind or x.dtype is not dtype:
            return False
        try:
            place = x.data_ptr()
            if x.shape != shape or not x.is_contiguous() or x.is_neg():
                return False
        except RuntimeError:  # it is sparse, or nested: no such matrix has all of these
            return False
        if once and site in held.weights:
            return True
        try:
            with held.lock:
                room = held.room
                look = None if room is None else room.open_again(site, before, place, given, held.turn)
            if look is None:
                return False
            fill = look.again
            assert fill is not None  # or it were none of those
            held.met += 1  # as `is_timed` has it, which takes as long as a name that is looked up
            if held.met % TIMED == 1:
                with timed(site, device, held):  # which may keep an error for himself
                    fill(x, place, look.numbers)
                    look.failed = False
            else:
                fill(x, place, look.numbers)
                look.failed = False
        except Exception as error:
            watched.failed(site, error)
            return True
        if once and not look.failed:
            held.weights.add(site)
        return True

    return again
