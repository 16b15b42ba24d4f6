"""What a watched FP8 step of the demo costs on this CPU, beside its BF16 step.

    bf16        the packaged script's step, as written
    fp8         the same model converted
    watched     converted, and every metric of every site recorded

Limits that the project set itself: watched <= 4 x bf16, and watching (watched - fp8) <= 30% of the watched step. All
take turns in one process, so a machine whose speed drifts does not tilt them, and the process's own time is taken, of
all its threads, which a busy machine does not stretch. Where a model's memory happens to lie
makes some percent of difference too, so every variant is built anew several times; medians over all steps.

    python -m benchmarks.bench_watched_step [--rounds 8] [--builds 4] [--size tiny]
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from benchmarks.record import record
from torch import nn

import narrowgauge as ng
from narrowgauge.compute.nn import set_observer
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.scripts import gpt

RECIPES = ("current", "delayed", "blockwise")
ACCUM = 2


def stepper(model: nn.Module, size: gpt.Size, collector: Collector | None) -> Callable[[], float]:
    """A function that makes one training step and returns its seconds of CPU time."""
    device = torch.device("cpu")
    optimizer = gpt.make_optimizer(model, size.lr, device)
    generator = torch.Generator().manual_seed(0)
    taken = 0

    def step() -> float:
        nonlocal taken
        taken += 1
        batches = [torch.randint(256, (2, size.batch, size.seq), generator=generator) for _ in range(ACCUM)]
        began = time.process_time()
        if collector is not None:
            collector.begin_step(taken)
        for tokens, targets in batches:
            (gpt.next_byte_loss(model, tokens, targets) / ACCUM).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if collector is not None:
            collector.end_step()
        return time.process_time() - began

    return step


def variants(size: gpt.Size, seed: int) -> dict[str, Callable[[], float]]:
    """A step function for every variant, in an order of its own for every seed."""
    torch.manual_seed(seed)
    plain = gpt.Llama(size)
    steps = {"bf16": stepper(plain, size, None)}
    for recipe in RECIPES:
        for watched in (False, True):
            model, _ = ng.convert(copy.deepcopy(plain), recipe)
            collector = None
            if watched:
                collector = Collector(RunWriter(tempfile.mkdtemp(), {}), every=1)
                set_observer(model, collector)
            steps[f"{recipe}{' watched' if watched else ''}"] = stepper(model, size, collector)
    names = list(steps)
    random.Random(seed).shuffle(names)
    return {name: steps[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--builds", type=int, default=4)
    parser.add_argument("--size", default="tiny", choices=gpt.SIZES)
    args = parser.parse_args()
    size = gpt.SIZES[args.size]
    seconds: dict[str, list[float]] = {}
    for build in range(args.builds):
        steps = variants(size, build)
        for round_ in range(args.rounds + 2):
            for name, step in steps.items():
                took = step()
                if round_ >= 2:
                    seconds.setdefault(name, []).append(took)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = []
    for recipe in RECIPES:
        fp8, watched = medians[recipe], medians[f"{recipe} watched"]
        rows.append(
            {
                "recipe": recipe,
                "fp8 / bf16": round(fp8 / medians["bf16"], 2),
                "watched / bf16": round(watched / medians["bf16"], 2),
                "watching, % of the watched step": round(100 * (watched - fp8) / watched, 1),
            }
        )
    record(
        "watched_step",
        {"size": args.size, "threads": torch.get_num_threads(), "rounds": args.rounds, "builds": args.builds},
        rows,
    )


if __name__ == "__main__":
    main()
