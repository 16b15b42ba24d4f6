"""What watching a program costs on this CPU, beside the same program unwatched.

    alone                  the training step as it is
    unwatched              followed, in steps that are not recorded: loss, norms, learning rate, tokens, time
    recorded               each tensor of every linear layer judged by the recipe `current`, weights and update measured
    asked, recorded        the same, and judged by all other recipes without state: what an ordinary run does in its
                           1st, 4th, 16th, ... recorded step
    RECIPE                 the step with its linear layers in FP8 by that recipe, emulated
    RECIPE, recorded       the same, operands, results and gemm checks recorded, weights and update measured

What is recorded stands beside the same step without us, converted or not: by so many percent it is longer. A converted
step stands beside the program as it is. Limits that the project set itself: an unwatched step costs nothing measurable,
a recorded one at most 30% more.

    tiny, small       the packaged script's smallest Llama and its next, BF16 autocast
    layers-N          three linear layers N x N with a GELU behind each, N tokens, BF16 autocast
    layers-N-float32  the same without autocast
    layers-NxM        M such layers, N / 2 tokens

All take turns in blocks of one process, over the same model and optimizer; a ratio is taken within each round, and the
median over rounds is told with the quartiles. Wall time is what a user waits for; the process's CPU time counts the
thread that writes. Others on the same machine slow a step's CPU time as well, by what they take of its caches, so the
ratio of the fastest tenths of all steps is told beside it: what is least disturbed, and without the writing.

    python -m benchmarks.watch_cost_cpu [--rounds 9] [--steps 5] [--sizes tiny layers-512 ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks.record import record
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeWarning
from narrowgauge.observe.stats import host
from narrowgauge.scripts import gpt

WARM = 2  # steps of each block that are not counted: opening a run reads all weights once
NEVER = 1_000_000_000
RECIPES = ("current", "rowwise", "delayed", "blockwise")
BESIDE = {"alone": "alone", "unwatched": "alone", "recorded": "alone", "asked, recorded": "alone"}  # kind -> beside it
ASKED = '["current", "rowwise", "blockwise", "mxfp8", "mxfp8-ocp"]'
BY_ONE = '["current"]'
for _recipe in RECIPES:  # beside each other in time as well: a machine's speed drifts
    BESIDE |= {_recipe: "alone", f"{_recipe}, recorded": _recipe}
SIZES = ("tiny", "layers-512", "layers-1024", "layers-512-float32", "small")

Loss = Callable[[], Tensor]


def program(name: str) -> tuple[nn.Module, Loss, int]:
    """A model, its loss on new data, and the tokens of a step."""
    generator = torch.Generator().manual_seed(0)
    if name in gpt.SIZES:
        size = gpt.SIZES[name]
        llama = gpt.Llama(size)

        def next_byte() -> Tensor:
            tokens, targets = torch.randint(256, (2, size.batch, size.seq), generator=generator)
            return gpt.next_byte_loss(llama, tokens, targets)

        return llama, next_byte, size.batch * size.seq
    _, width, *rest = name.split("-")
    N, *times = map(int, width.split("x"))
    layers, batch = (times[0], N // 2) if times else (3, N)
    stack = nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(N, N), nn.GELU())))

    def square() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=rest != ["float32"]):
            y = stack(torch.randn(batch, N, generator=generator))
        return y.float().square().mean()

    return stack, square, batch


def block(
    kind: str, model: nn.Module, train: Callable[[], None], steps: int, folder: Path
) -> tuple[float, float, list[float]]:
    """Seconds per step, of the wall's clock and of the process's; and the latter of each step."""
    every = NEVER if kind == "unwatched" else 1 if kind.endswith("recorded") else None
    recipe = kind.partition(",")[0]
    wall, own = [], []
    with ExitStack() as around:
        if recipe in RECIPES:
            around.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", NarrowgaugeWarning)  # its optimizer has stepped before: so it should
            ng.convert(model, recipe)
            around.callback(ng.revert, model)
        if every is not None:
            config = folder.with_suffix(".toml")
            config.write_text(f"[watch]\nwhat_if = {ASKED if recipe == 'asked' else BY_ONE}\n")
            around.enter_context(ng.watch(out=folder, every=every, config=config))
        for number in range(WARM + steps):
            began, own_began = time.perf_counter(), time.process_time()
            train()
            if number >= WARM:
                wall.append(time.perf_counter() - began)
                own.append(time.process_time() - own_began)
    return statistics.median(wall), statistics.mean(own), own


def training(name: str) -> tuple[nn.Module, Callable[[], None], int]:
    """A model, one of its training steps, and that step's tokens."""
    torch.manual_seed(0)
    model, loss, tokens = program(name)
    optimizer = gpt.make_optimizer(model, 1e-3, torch.device("cpu"))

    def train() -> None:
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, train, tokens


def compare(name: str, rounds: int, steps: int, recipes: list[str]) -> list[dict[str, Any]]:
    """One row for each kind of step, of one program."""
    model, train, tokens = training(name)
    kinds = [kind for kind in BESIDE if kind.partition(",")[0] not in {*RECIPES, "asked"} - {*recipes}]
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    each: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for at, kind in enumerate(kinds[number % len(kinds) :] + kinds[: number % len(kinds)]):
                *found, own = block(kind, model, train, steps, Path(folder) / f"{number}-{at}")
                if number:  # the first round compiles and imports
                    times[kind].append((found[0], found[1]))
                    each[kind] += own
    fastest = {kind: statistics.quantiles(each[kind], n=10)[0] for kind in kinds}
    rows = []
    for kind in kinds:
        row: dict[str, Any] = {"program": name, "step": kind, "beside": BESIDE[kind]}
        row["ms"] = round(1000 * statistics.median(t[0] for t in times[kind]), 1)
        for which, clock in enumerate(("wall", "cpu")):
            ratios = [a[which] / b[which] for a, b in zip(times[kind], times[BESIDE[kind]], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row |= {f"{clock} ratio": round(middle, 3), f"{clock} quartiles": f"{low:.3f} to {high:.3f}"}
        row["fastest tenths' ratio"] = round(fastest[kind] / fastest[BESIDE[kind]], 3)
        if kind == "unwatched" or kind.endswith("recorded"):
            row["watching, % of the step without"] = round(100 * (row["cpu ratio"] - 1), 1)
        rows.append(row | {"tokens": tokens, "parameters": sum(p.numel() for p in model.parameters())})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=("asked", *RECIPES))
    args = parser.parse_args()
    host.wait()
    rows = [row for name in args.sizes for row in compare(name, args.rounds, args.steps, args.recipes)]
    record("watch_cost", {"threads": torch.get_num_threads(), "rounds": args.rounds, "steps": args.steps}, rows)


if __name__ == "__main__":
    main()
