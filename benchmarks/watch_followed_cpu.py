"""How much longer a step is that is followed and not recorded, on this CPU, in microseconds of the thread's time.

Blocks of steps alone and followed take turns; told is the median over rounds of the difference of both blocks' median
steps, and that of the fastest tenths of all. Each round opens a run of its own, so functions are met cold. To compare
two versions, run it with either's `src` on PYTHONPATH, in turn.

    python -m benchmarks.watch_followed_cpu [--size layers-512] [--rounds 40]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.watch_cost_cpu import NEVER, training

import narrowgauge as ng
from narrowgauge.observe.stats import host

WARM, STEPS = 3, 12


def seconds(train: Callable[[], None]) -> list[float]:
    """Of each step, but for the first few."""
    found = []
    for _ in range(WARM + STEPS):
        began = time.thread_time()
        train()
        found.append(time.thread_time() - began)
    return found[WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="layers-512")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    host.wait()
    torch.set_num_threads(1)
    _, train, _ = training(args.size)
    alone, followed, more = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            with ng.watch(out=Path(folder) / str(number), every=NEVER):
                with_us = seconds(train)
            without = seconds(train)
            more.append(statistics.median(with_us) - statistics.median(without))
            alone += without
            followed += with_us
    fastest = [1e6 * statistics.quantiles(each, n=10)[0] for each in (alone, followed)]
    print(
        f"{args.size}: {1e3 * statistics.median(alone):.2f} ms alone, followed {1e6 * statistics.median(more):.0f} us "
        f"more; by the fastest tenths {fastest[1] - fastest[0]:.0f}"
    )


if __name__ == "__main__":
    main()
