"""What it takes to read all gradients for their norm, beside the step that they are of.

Steps of a program that does not clip, with one norm of each gradient taken in between, timed by itself: the medians, in
milliseconds, and the norm's share of the step without it.

    python -m benchmarks.gradient_norms [--sizes small layers-2048 ...] [--steps 20] [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from benchmarks.record import record
from benchmarks.watch_measurable import on_cpu, on_gpu

from narrowgauge.observe.stats import host
from narrowgauge.scripts import gpt

SIZES = ("tiny", "layers-1024", "small", "layers-2048")
WARM = 3


def row_of(name: str, steps: int, device: str) -> dict[str, Any]:
    """A program's row."""
    torch.manual_seed(0)
    model, loss = on_cpu(name) if device == "cpu" else on_gpu(name)
    optimizer = gpt.make_optimizer(model, 1e-3, torch.device(device))
    whole, norms = [], []
    for number in range(WARM + steps):
        began = _now(device)
        loss(model).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        made = _now(device)
        torch._foreach_norm(gradients)
        normed = _now(device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number >= WARM:
            whole.append(1e3 * (_now(device) - normed + made - began))
            norms.append(1e3 * (normed - made))
    step, norm = statistics.median(whole), statistics.median(norms)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return {
        "program": name,
        "million_weights": round(millions, 2),
        "step_ms": round(step, 2),
        "norm_ms": round(norm, 3),
        "norm_pct": round(100 * norm / step, 2),
    }


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    host.wait()
    if args.device == "cpu":
        torch.set_num_threads(1)
    rows = [row_of(name, args.steps, args.device) for name in args.sizes]
    record("gradient_norms", {"steps": args.steps, "threads": torch.get_num_threads()}, rows)


if __name__ == "__main__":
    main()
