"""What watching costs on this CPU: per element, and beside one linear layer's forward and backward.

    tally      one operand, all its metrics, ns per element          result   one gemm result
    bf16       linear forward and backward under autocast            fp8      the same, converted
    watched    converted, every tensor of every step recorded

Each round takes every variant once, in turn; the best of the rounds. With `--cpu-time` the process's CPU seconds, which
other programs on the machine disturb less (use one thread: two spin while they wait for each other).

    python -m benchmarks.stats [--rounds 40] [--threads 2] [--cpu-time]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.record import record
from torch import nn

import narrowgauge as ng
from narrowgauge.compute.nn import set_observer
from narrowgauge.observe.stats import Collector, host
from narrowgauge.observe.stats.moments import tallies_of
from narrowgauge.observe.stats.results import result_head

TOKENS, WIDTH, LAYERS = 2048, 256, 4
OPERANDS = {"per tensor": ng.PerTensor(), "1x128": ng.Block(1, 128), "128x128": ng.Block(128, 128)}
RECIPES = ("current", "delayed", "blockwise")


class Nowhere:
    """A writer that drops what it gets: the store has a benchmark of its own."""

    def add_tensors(self, *args: Any) -> None:
        pass

    def add_event(self, *args: Any) -> None:
        raise AssertionError(f"the watch failed: {args}")


def best(calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = clock()
            call()
            seconds[name].append(clock() - began)
    return {name: min(times) for name, times in seconds.items()}


def per_element(rounds: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    calls: dict[str, Callable[[], object]] = {}
    sizes = {}
    for rows in (TOKENS, WIDTH):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, WIDTH).to(dtype)
            of = f"{rows}x{WIDTH} {str(dtype).removeprefix('torch.')}"
            for name, granularity in OPERANDS.items():
                q = ng.quantize(x, ng.formats.E4M3FN, granularity)
                calls[f"operand {of} {name}"] = lambda x=x, q=q: tallies_of(x, q, 3)
                sizes[f"operand {of} {name}"] = x.numel()
            calls[f"result {of}"] = lambda x=x: result_head(x)
            sizes[f"result {of}"] = x.numel()
    found = best(calls, rounds, clock)
    return [{"what": name, "ns per element": round(1e9 * found[name] / sizes[name], 2)} for name in calls]


def stepper(model: nn.Module, collector: Collector | None) -> Callable[[], object]:
    x, dy = (torch.randn(TOKENS, WIDTH).bfloat16() for _ in range(2))
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        if collector is not None:
            collector.begin_step(taken)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.backward(dy)
        if collector is not None:
            collector.end_step()

    return step


def beside_a_layer(rounds: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    calls = {"bf16": stepper(layers(), None)}
    for recipe in RECIPES:
        calls[recipe] = stepper(ng.convert(layers(), recipe)[0], None)
        collector = Collector(Nowhere())
        model = ng.convert(layers(), recipe)[0]
        set_observer(model, collector)
        calls[f"{recipe} watched"] = stepper(model, collector)
    found = best(calls, rounds, clock)
    return [
        {
            "what": f"{LAYERS} layers, {TOKENS}x{WIDTH}x{WIDTH}, {recipe}",
            "bf16 ms": round(1e3 * found["bf16"], 2),
            "fp8 ms": round(1e3 * found[recipe], 2),
            "watched ms": round(1e3 * found[f"{recipe} watched"], 2),
            "watching, % of the watched step": round(100 * (1 - found[recipe] / found[f"{recipe} watched"]), 1),
        }
        for recipe in RECIPES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    host.wait()
    clock = time.process_time if args.cpu_time else time.perf_counter
    settings = {"threads": args.threads, "rounds": args.rounds, "clock": clock.__name__}
    record("stats_element", settings, per_element(args.rounds, clock))
    record("stats_layer", settings, beside_a_layer(args.rounds, clock))


if __name__ == "__main__":
    main()
