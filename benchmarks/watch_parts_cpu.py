"""Which part of a recorded step costs what on this CPU: the step is recorded whole, and then with one part left out.

    judging      what becomes of each tensor by a rule: the compiled walk and the way to it
    listening    hooks on layers and around products, and judging
    weights      their norm, and a copy that their update is measured on

What a part takes is the difference, in milliseconds of the thread's CPU time, medians over rounds in turn; parts left
out together might save less, because what one reads the next finds in the cache.

Of a step that is not recorded, which scatters by more than it costs us, the time in each of our functions that torch
calls is summed instead: means over steps, of the thread's CPU time.

    python -m benchmarks.watch_parts_cpu [--rounds 7] [--sizes tiny layers-512] [--only-unrecorded]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.record import record
from benchmarks.watch_cost_cpu import BY_ONE, training

import narrowgauge as ng
from narrowgauge.observe.stats import collector, host
from narrowgauge.session.models.calls import Calls
from narrowgauge.session.sites.plain_sites import PlainSites
from narrowgauge.session.steps.updates import Updates
from narrowgauge.session.tensors.movement import Movement

STEPS, WARM = 30, 4
Part = tuple[Any, str, Callable[..., Any]]
PARTS: dict[str, Part | None] = {
    "nothing": None,
    "judging": (collector.Collector, "judge", lambda *args: True),
    "listening": (PlainSites, "begin", lambda self: None),
    "weights": (Movement, "before", lambda *args, **options: None),
}
DOORS = (
    *((Calls, name) for name in ("module_called", "begins", "ended")),
    *((Updates, name) for name in ("backward_begins", "backward_ended", "gradients_clipped", "gradients_zeroed")),
    *((Updates, name) for name in ("step_begins", "step_ended")),
)


@contextmanager
def without(part: Part | None) -> Iterator[None]:
    """One function does nothing."""
    if part is None:
        yield
        return
    owner, name, instead = part
    before = getattr(owner, name)
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, before)


def milliseconds(train: Callable[[], None]) -> float:
    """The median step's CPU time."""
    taken = []
    for _ in range(STEPS):
        began = time.thread_time()
        train()
        taken.append(time.thread_time() - began)
    return 1e3 * statistics.median(taken)


@contextmanager
def timed(taken: dict[str, list[float]]) -> Iterator[None]:
    """Each call of a door is noted, in seconds."""

    def around(name: str, door: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return door(*args, **kwargs)
            finally:
                taken.setdefault(name, []).append(time.thread_time() - began)

        return run

    before = [(owner, name, getattr(owner, name)) for owner, name in DOORS]
    try:
        for owner, name, door in before:
            setattr(owner, name, around(name, door))
        yield
    finally:
        for owner, name, door in before:
            setattr(owner, name, door)


def unrecorded(name: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each door of a step that is not recorded, and for all of them."""
    _, train, _ = training(name)
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, timed(taken), ng.watch(out=folder, every=1_000_000_000):
        for _ in range(WARM):
            train()
        taken.clear()
        for _ in range(rounds * STEPS):
            train()
    each = {door: 1e3 * statistics.mean(seconds) for door, seconds in taken.items()}
    doors = {"all doors": sum(each.values()), **each}
    return [{"program": name, "what": f"not recorded, {door}", "ms": round(ms, 3)} for door, ms in doors.items()]


def parts_of(name: str, rounds: int) -> list[dict[str, Any]]:
    """A row for the unwatched step, for the recorded one, and for each part."""
    _, train, _ = training(name)
    alone: list[float] = []
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        alike = Path(folder) / "alike.toml"
        alike.write_text(f"[watch]\nwhat_if = {BY_ONE}\n")  # or some steps would be asked of by all recipes
        for number in range(rounds):
            milliseconds(train)
            alone.append(milliseconds(train))
            for part, what in PARTS.items():
                with without(what), ng.watch(out=Path(folder) / f"{number}-{part}", every=1, config=alike):
                    for _ in range(WARM):
                        train()
                    found[part].append(milliseconds(train))
    whole = statistics.median(found["nothing"])
    rows = [{"program": name, "what": "unwatched", "ms": round(statistics.median(alone), 2)}]
    rows.append({"program": name, "what": "recorded", "ms": round(whole, 2)})
    for part in list(PARTS)[1:]:
        rows.append({"program": name, "what": part, "ms": round(whole - statistics.median(found[part]), 2)})
    return rows


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "layers-512"])
    parser.add_argument("--only-unrecorded", action="store_true", help="print these rows, and record nothing")
    args = parser.parse_args()
    host.wait()
    torch.set_num_threads(1)
    rows = [row for name in args.sizes for row in unrecorded(name, args.rounds)]
    if args.only_unrecorded:
        print(*rows, sep="\n")
        return
    rows += [row for name in args.sizes for row in parts_of(name, args.rounds)]
    record("watch_parts", {"threads": 1, "rounds": args.rounds, "steps": STEPS}, rows)


if __name__ == "__main__":
    main()
