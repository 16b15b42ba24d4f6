"""What watching a program costs on this CPU: a plain Llama of the packaged script, nothing converted.

    alone       the training step without narrowgauge
    unwatched   followed, in steps that are not recorded: loss, norms, learning rate, tokens, time
    recorded    every tensor of every linear layer judged by the recipe `current`, weights and update measured

Limits that the project set itself: an unwatched step costs nothing measurable, a recorded one at most 30% more.

The three take turns in blocks of one process, over the same model and optimizer; a ratio is taken within each round,
and the median over rounds is told with the quartiles. Wall time is what a user waits for; the process's CPU time does
not depend on what else the machine does, and counts the thread that writes.

    python benchmarks/watch_cost_cpu.py [--rounds 9] [--steps 5] [--sizes tiny small]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from benchmarks.record import record
from torch import nn

import narrowgauge as ng
from narrowgauge.scripts import gpt

WARM = 2  # steps of each block that are not counted: opening a run reads all weights once
NEVER = 1_000_000_000


def block(kind: str, train: Any, steps: int, folder: Path) -> tuple[float, float]:
    """Seconds per step, of the wall's clock and of the process's."""
    every = {"unwatched": NEVER, "recorded": 1}.get(kind)
    watch: AbstractContextManager[Any] = nullcontext() if every is None else ng.watch(out=folder, every=every)
    wall, own = [], []
    with watch:
        for number in range(WARM + steps):
            began, own_began = time.perf_counter(), time.process_time()
            train()
            if number >= WARM:
                wall.append(time.perf_counter() - began)
                own.append(time.process_time() - own_began)
    return statistics.median(wall), statistics.mean(own)


def compare(name: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """One row for each kind of step, of one size of the model."""
    torch.manual_seed(0)
    size = gpt.SIZES[name]
    model = gpt.Llama(size)
    optimizer = gpt.make_optimizer(model, size.lr, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)

    def train() -> None:
        tokens, targets = torch.randint(256, (2, size.batch, size.seq), generator=generator)
        gpt.next_byte_loss(model, tokens, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    kinds = ["alone", "unwatched", "recorded"]
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for kind in kinds[number % 3 :] + kinds[: number % 3]:
                found = block(kind, train, steps, Path(folder) / f"{kind}{number}")
                if number:  # the first round compiles and imports
                    times[kind].append(found)
    rows = []
    for kind in kinds:
        row: dict[str, Any] = {"size": name, "step": kind}
        row["ms"] = round(1000 * statistics.median(t[0] for t in times[kind]), 1)
        for which, clock in enumerate(("wall", "cpu")):
            ratios = [a[which] / b[which] for a, b in zip(times[kind], times["alone"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row |= {f"{clock} / alone": round(middle, 3), f"{clock} quartiles": f"{low:.3f} to {high:.3f}"}
        rows.append(row | {"tokens": size.batch * size.seq, "parameters": sum(p.numel() for p in model.parameters())})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"], choices=("tiny", "small"))
    args = parser.parse_args()
    rows = []
    for name in args.sizes:
        slow = name != "tiny"  # a second and more for each step
        rows += compare(name, 3 if slow else args.rounds, 2 if slow else args.steps)
    record("watch_cost", {"threads": torch.get_num_threads(), "rounds": args.rounds, "steps": args.steps}, rows)


if __name__ == "__main__":
    main()
