"""What lies in memory at the peak of a training step: every allocation of one step is followed, variant by variant.

python -m benchmarks.gpu_memory 8b-slice "torchao tensorwise,current,delayed,torchao rowwise,rowwise"

Prints for each the bytes before the step and at its peak, and what was allocated and not yet freed then: sizes, and the
lines of ours, or of the compiled graph, that asked for them.
"""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import torch

from narrowgauge.bench.memory import forget
from narrowgauge.bench.shapes import sized
from narrowgauge.bench.variants import Stepper, Variant, many_graphs

GIB, MIB = 2**30, 2**20


def variant(name: str) -> Variant:
    """`bf16`, RECIPE, or `torchao RECIPE`."""
    peer, _, recipe = name.rpartition(" ")
    return Variant(name, recipe=None if recipe == "bf16" else recipe, peer=peer or None)


def show(step: Stepper) -> None:
    """Follow one step and print what its peak is made of."""
    torch.cuda.synchronize()
    now = before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=200_000)
    step()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    peak, live, at_peak = before, {}, {}  # address -> size and line
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"], line(event["frames"])
            now += event["size"]
            if now > peak:
                peak, at_peak = now, dict(live)
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
            now -= event["size"]
    print(f"   {before / GIB:.3f} GiB before, {peak / GIB:.3f} GiB at the peak, of which this step's:")
    kinds = collections.Counter(at_peak.values())
    for (size, asked), count in sorted(kinds.items(), key=lambda kind: -kind[0][0] * kind[1])[:24]:
        print(f"   {size / MIB:9.2f} MiB x {count:<3} {asked}")


def line(frames: list[dict[str, Any]]) -> str:
    """The innermost line of a compiled graph or of ours, and the function."""
    for frame in frames:
        path = Path(frame["filename"])
        if "torchinductor" in frame["filename"] or "narrowgauge" in path.parts:
            return f"{path.name}:{frame['line']} {frame['name']}"
    return "elsewhere"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=("8b-slice", "1b"))
    parser.add_argument("variants", help="comma-separated")
    args = parser.parse_args()
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, args.size)
    for name in args.variants.split(","):
        print(f"== {name}", flush=True)
        with many_graphs():
            step = Stepper(variant(name), sized(args.size), device)
            for _ in range(4):
                step()
            show(step)
        del step
        forget(device)


if __name__ == "__main__":
    main()
