"""What a recorded step costs on this CPU beside the steps around it, of one run that records every fourth.

A machine that others use, or whose cores are another's, drifts by more than a recorded step costs while one block of
steps is measured after another (`watch_cost_cpu`). Here recorded and unrecorded steps take turns, one by one; what an
unrecorded one costs beside none watched is not seen. Told are the medians, and what the fastest tenth of each takes.

    python -m benchmarks.watch_cost_interleaved_cpu [--steps 128] [--sizes tiny layers-512-float32 ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.record import record
from benchmarks.watch_cost_cpu import BY_ONE, training

import narrowgauge as ng
from narrowgauge.observe.stats import host

EVERY, WARM = 4, 16


def measure(name: str, steps: int) -> dict[str, Any]:
    """One row, of one program."""
    _, train, _ = training(name)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "narrowgauge.toml"
        config.write_text(f"[watch]\nwhat_if = {BY_ONE}\n")
        for _ in range(WARM):
            train()
        with ng.watch(out=Path(folder) / "run", every=EVERY, config=config):
            for _ in range(WARM + steps):
                began = time.perf_counter()
                train()
                seconds.append(time.perf_counter() - began)
    turns = [seconds[WARM + turn :: EVERY] for turn in range(EVERY)]
    recorded = max(range(EVERY), key=lambda turn: statistics.median(turns[turn]))
    others = [turns[turn] for turn in range(EVERY) if turn != recorded]
    row: dict[str, Any] = {"program": name}
    for label, which in (("median", 4), ("fastest tenth", 0)):
        plain, slow = (
            statistics.fmean(statistics.quantiles(turn, n=10)[which] for turn in some)
            for some in (others, [turns[recorded]])
        )
        row |= {f"{label}, ms": round(1000 * plain, 2), f"recorded {label}, ms": round(1000 * slow, 2)}
        row[f"{label}, %"] = round(100 * (slow / plain - 1), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "layers-512-float32"])
    args = parser.parse_args()
    host.wait()
    settings = {"threads": torch.get_num_threads(), "steps": args.steps, "every": EVERY}
    record("watch_cost_interleaved", settings, [measure(name, args.steps) for name in args.sizes])


if __name__ == "__main__":
    main()
