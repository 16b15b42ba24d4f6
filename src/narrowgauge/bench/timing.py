"""Time several variants fairly: in turn, round by round, so that a machine whose speed drifts tilts none of them.

    round 1:  a a' b b' c c'      round 2:  a a' b b' c c'      ...      the first calls of a turn are not counted
    median, p10, p90 over all counted samples of a variant               milliseconds

On a GPU a sample is the time between two events in its stream, so it holds what the device did and whatever it waited
for. The host waits once per turn, and is then ahead of the device by the lead, as it is in a training run. On a CPU it
is the clock. `cold` fills the caches with something else before each sample, and on a GPU so often that the host has
launched the whole call before the device comes to it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

FLUSH_BYTES = 1 << 30  # far more than any cache holds
HIDDEN_SECONDS = 150e-6  # of the host's time, behind one flush of a fast GPU (H200: 270 microseconds)


@dataclass(frozen=True)
class Timing:
    """What one call took, in milliseconds: the median, the 10th and the 90th percentile, and of how many samples.

    `host` is how long the host was busy with a call that found an idle device, None if no such call was made. Near the
    median, it is the host that is too slow.
    """

    median: float
    p10: float
    p90: float
    samples: int
    host: float | None = None


def summarize(milliseconds: Sequence[float]) -> Timing:
    """The median and the spread of the samples, of which there is at least one."""
    if len(milliseconds) == 1:
        return Timing(milliseconds[0], milliseconds[0], milliseconds[0], 1)
    tenths = statistics.quantiles(milliseconds, n=10, method="inclusive")
    return Timing(statistics.median(milliseconds), tenths[0], tenths[-1], len(milliseconds))


def wait(device: torch.device) -> None:
    """Return when everything that was launched on `device` has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 10,
    samples: int = 1,
    block: int = 1,
    lead: int = 0,
    cold: bool = False,
) -> dict[str, Timing]:
    """Time every call and return its timing, milliseconds per call.

    The first call of each, in which kernels are compiled, is made before the first round. A turn is `lead` calls that
    are not counted, then `samples` samples of `block` calls each.
    """
    flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device=device) if cold else None
    found: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(lead):
                call()
            busy = (time.perf_counter() - began) / max(1, lead)
            if lead:
                host[name].append(1e3 * busy)
            hidden = busy * block
            if cold:
                wait(device)
            found[name] += _turn(call, device, samples, block, flush, 1 + int(hidden / HIDDEN_SECONDS))
    return {
        name: replace(summarize(times), host=statistics.median(host[name]) if host[name] else None)
        for name, times in found.items()
    }


def _turn(
    call: Callable[[], object],
    device: torch.device,
    samples: int,
    block: int,
    flush: torch.Tensor | None,
    flushes: int,
) -> list[float]:
    """Milliseconds per call of each sample; a GPU's caches are emptied of it by `flushes` reads before, at most 8."""
    if device.type != "cuda":
        times = []
        for _ in range(samples):
            if flush is not None:
                flush.zero_()
            began = time.perf_counter()
            for _ in range(block):
                call()
            times.append(1e3 * (time.perf_counter() - began) / block)
        return times
    events = []
    for _ in range(samples):
        if flush is not None:
            for _ in range(min(flushes, 8)):
                flush.amax()  # read, not written: dirty lines would be paid for by the call
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(block):
            call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / block for begin, end in events]
