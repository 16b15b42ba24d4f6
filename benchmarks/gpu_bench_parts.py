"""What three single ideas of the fast path bring, each with and without, in turn in one process.

    kept      weights quantized once per optimizer step, and not once per microbatch     a step of four microbatches
    roll      the histories of all sites follow in one launch, and not group by group    one end of a step
    layouts   which layouts torch's FP8 product reads: where only one, a copy is needed  an answer, no time

Medians in milliseconds; `host` is how long the host was busy. On a CPU shapes are tiny, and say only that it works.

    python -m benchmarks.gpu_bench_parts [--size 1b] [--rounds 10]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from benchmarks.record import record
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.bench.shapes import KEPT, sized
from narrowgauge.bench.timing import Timing, interleave
from narrowgauge.compute.nn.kept_weight import KeptWeight
from narrowgauge.compute.nn.scaling.rolling import HAS_TRITON, roll_at_once, roll_by_groups, rules_of
from narrowgauge.compute.nn.scaling.scale_table import ScaleTable
from narrowgauge.compute.recipes import DELAYED
from narrowgauge.scripts import gpt

MICROBATCHES, SITES = 4, 64
LAYOUTS = {"row-major": lambda x: x.contiguous(), "column-major": lambda x: x.t().contiguous().t()}


def row(part: str, what: str, took: Timing | None, **more: Any) -> dict[str, Any]:
    times = {} if took is None else {"ms": round(took.median, 4), "p10": round(took.p10, 4), "p90": round(took.p90, 4)}
    host = None if took is None or took.host is None else round(took.host, 3)
    return {"part": part, "what": what, "ms": "", "p10": "", "p90": "", **times, "host": host, "answer": "", **more}


def kept(recipe: str, size: gpt.Size, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """A step of several small microbatches, whose weights are quantized once, or each time."""
    torch.manual_seed(0)
    with device:
        model: nn.Module = gpt.Llama(size).bfloat16()
    model, _ = ng.convert(model, recipe=recipe, skip=(KEPT,))
    if device.type == "cuda":
        for block in model.blocks:
            block.compile()
    optimizer = gpt.make_optimizer(model, size.lr, device)

    def step() -> None:
        for _ in range(MICROBATCHES):
            tokens, targets = torch.randint(size.vocab, (2, 1, size.seq), device=device)
            nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def each_time() -> None:
        with mock.patch.object(KeptWeight, "worth_keeping", return_value=False):
            step()

    took = interleave({"once a step": step, "each time": each_time}, device, rounds=rounds, samples=2)
    step_of = f"{recipe}, {MICROBATCHES} microbatches of {size.seq} tokens"
    return [row("kept", f"{step_of}, {what}", timing) for what, timing in took.items()]


def rolled(device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """The end of a step for all sites of a model."""
    table = ScaleTable(device)
    for layer in range(SITES):
        table.add(f"layer{layer}", DELAYED)
    table.amax_now.fill_(1.0)
    tensors = table.history, table.amax_now, table.scale, table.inv_scale
    groups = [(group, torch.tensor(group.rows, device=device)) for group in table._groups]
    calls: dict[str, Callable[[], object]] = {"group by group": lambda: roll_by_groups(*tensors, groups, 1)}
    if device.type == "cuda" and HAS_TRITON:
        rules = rules_of(table._groups, device)
        calls["one launch"] = lambda: roll_at_once(*tensors, rules, 1)
    took = interleave(calls, device, rounds=10 * rounds, samples=4)
    return [row("roll", f"{len(table.sites)} sites, {what}", t) for what, t in took.items()]


def layouts(device: torch.device) -> list[dict[str, Any]]:
    """Does `torch._scaled_mm` take codes in each layout?"""
    one = torch.ones((), device=device)

    def answer(a: Tensor, b: Tensor) -> str:
        try:
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
        except (RuntimeError, ValueError) as error:
            return "no: " + " ".join(str(error).split())[:120]
        return "yes"

    found = []
    for left, of_a in LAYOUTS.items():
        for right, of_b in LAYOUTS.items():
            a, b = (torch.ones(256, 256, device=device).to(torch.float8_e4m3fn) for _ in range(2))
            said = answer(of_a(a), of_b(b))
            found.append(row("layouts", f"a [M, K] {left}, b [K, N] {right}", None, answer=said))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="")
    parser.add_argument("--recipes", default="current,delayed,rowwise,blockwise")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = sized(args.size or ("1b" if device.type == "cuda" else "tiny"))
    began, rows = time.monotonic(), layouts(device) + rolled(device, args.rounds)
    for recipe in args.recipes.split(","):
        rows += kept(recipe, size, device, args.rounds)
        print(f"{recipe}: {time.monotonic() - began:.0f} s", flush=True)
        record("parts", {"size": args.size, "rounds": args.rounds, "microbatches": MICROBATCHES}, rows)


if __name__ == "__main__":
    main()
