"""What recording a step costs where nobody converted anything: a BF16 Llama of nn.Linear, and torchao's copy of it.

    plain       a step that is not recorded: no hook is there
    recorded    every operand of every layer is read once more, quantized, and counted

The model is one and the same, and its steps take turns, so neither memory nor a drifting clock tilts them; medians. On
a CPU the process's own time is taken, of all its threads, which a busy machine does not stretch.
Limits that the project set itself: recording costs at most 30% of a recorded step on a CPU, and 10% on an H200.

    python -m benchmarks.bench_foreign_step [--device cuda --size 1b] [--rounds 12] [--kinds plain,torchao]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from typing import Any

import torch
from benchmarks.record import record
from torch import nn

from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.scripts import gpt
from narrowgauge.session.plain_sites import PlainSites

KINDS = ("plain", "torchao", "torchao-rowwise")


def made(plain: nn.Module, kind: str, emulate: bool) -> nn.Module:
    """A copy of the model, converted by torchao if so asked; its head stays high, as ours does."""
    model = copy.deepcopy(plain)
    if kind == "plain":
        return model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = "rowwise" if kind.endswith("rowwise") else "tensorwise"
    base = Float8LinearConfig.from_recipe_name(recipe)
    config = Float8LinearConfig(**{**vars(base), "emulate": emulate})
    head = list(dict(model.named_modules()))[-1]
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != head)


def measured(model: nn.Module, size: gpt.Size, device: torch.device, rounds: int) -> tuple[dict[str, Any], str]:
    """Median seconds of plain and of recorded steps, and what was not seen."""
    optimizer = gpt.make_optimizer(model, size.lr, device)
    collector = Collector(RunWriter(tempfile.mkdtemp(), {}), every=1)
    sites = PlainSites("current", eager=True, training=lambda: True)
    layers = sites.add(model, collector)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds: dict[str, list[float]] = {"plain": [], "recorded": []}
    for round_ in range(2 * rounds + 4):
        kind = ("plain", "recorded")[round_ % 2]
        tokens, targets = torch.randint(256, (2, size.batch, size.seq), device=device)
        _wait(device)
        began = clock()
        if kind == "recorded":
            collector.begin_step(round_)
            sites.begin()
        gpt.next_byte_loss(model, tokens, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sites.end()
        collector.end_step()
        _wait(device)
        if round_ >= 4:
            seconds[kind].append(clock() - began)
    collector.flush()
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    least = {kind: min(times) for kind, times in seconds.items()}
    row = {
        "layers": layers,
        "plain ms": round(1e3 * medians["plain"], 2),
        "recorded ms": round(1e3 * medians["recorded"], 2),
        "recording, % of the recorded step": _share(medians),
        "the same, of the quickest steps": _share(least),
        "failures": collector.failures,
    }
    return row, " ".join(sites.notes)


def _share(seconds: dict[str, float]) -> float:
    return round(100 * (seconds["recorded"] - seconds["plain"]) / seconds["recorded"], 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="tiny", choices=gpt.SIZES)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    device, size = torch.device(args.device), gpt.SIZES[args.size]
    torch.manual_seed(0)
    plain = gpt.Llama(size).to(device)
    rows = []
    for kind in args.kinds.split(","):
        row, notes = measured(made(plain, kind, emulate=device.type == "cpu"), size, device, args.rounds)
        rows.append({"kind": kind, **row})
        print(f"{kind}: {notes}")
    settings = {"device": args.device, "size": args.size, "rounds": args.rounds, "threads": torch.get_num_threads()}
    record("foreign_step", settings, rows)


if __name__ == "__main__":
    main()
