"""Two hundred steps of the packaged script: the fast path trains as the reference does, within their noise.

    fused, compiled      the fast path                                n runs of each recipe
    reference, eager     emulated products, exact quantizing          n runs of each recipe

    |mean(fast) - mean(reference)| <= 3 sqrt(var(fast) / n + var(reference) / n)

of the mean validation loss of the last evaluations. Runs differ by a factor (1 + 1e-6 N) on their initial weights:
after two hundred steps that is worth percents, so that one pair of runs says nothing. Recipes run beside each other, a
process each.

python -m benchmarks.gpu_loss_200 [--size small] [--steps 200] [--runs 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from benchmarks.record import record
from torch import nn

import narrowgauge as ng
from narrowgauge.scripts.gpt import (
    SIZES,
    Llama,
    Size,
    Tokens,
    evaluate,
    learning_rate,
    make_optimizer,
    next_byte_loss,
    read_corpus,
)

NOISE = 1e-6
RECIPES = ("bf16", "current", "delayed", "rowwise", "blockwise")  # bf16: what the noise alone does


def train(size: Size, steps: int, recipe: str, backend: str | None, compiled: bool, run: int) -> float:
    """Mean of four evaluations over the last quarter of the steps, nats per byte; `run` draws the perturbation."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    training, validation = (
        Tokens(text, size.seq, device, name) for text, name in zip(read_corpus(None), ("train", "eval"), strict=True)
    )
    with device:
        model: nn.Module = Llama(size)
    generator = torch.Generator(device).manual_seed(1 + run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + NOISE * torch.randn(parameter.shape, device=device, generator=generator))
    if recipe != "bf16":
        ng.convert(model, recipe=recipe, backend=backend, skip=["lm_head"])
    optimizer = make_optimizer(model, size.lr, device)
    if compiled:
        model.compile()
    data, losses = torch.Generator(device).manual_seed(0), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, size.lr)
        next_byte_loss(model, *training.sample(size.batch, data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step + 1 > steps * 3 // 4 and (step + 1) % max(1, steps // 16) == 0:
            losses.append(evaluate(model, validation, size.batch, 8))
    return sum(losses) / len(losses)


def compare(size: Size, steps: int, recipe: str, runs: int) -> dict[str, Any]:
    """One recipe's row: mean and scatter of both ways, and whether they lie within each other's noise."""
    losses = {
        "fast": [train(size, steps, recipe, None, compiled=True, run=run) for run in range(runs)],
        "reference": [train(size, steps, recipe, "reference", compiled=False, run=run) for run in range(runs)],
    }
    means = {name: statistics.fmean(found) for name, found in losses.items()}
    band = 3 * sum(statistics.variance(found) / runs for found in losses.values()) ** 0.5
    gap = means["fast"] - means["reference"]
    return {
        "recipe": recipe,
        **{name: round(mean, 5) for name, mean in means.items()},
        **{f"sd of {name}": round(statistics.stdev(found), 5) for name, found in losses.items()},
        "gap": round(gap, 5),
        "band": round(band, 5),
        "within": abs(gap) <= band,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5, help="of each kind; at least 2")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    args = parser.parse_args()
    recipes, rows = args.recipes.split(","), []
    settings = {"size": args.size, "steps": args.steps, "runs": args.runs}
    with ProcessPoolExecutor(len(recipes), multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(compare, SIZES[args.size], args.steps, recipe, args.runs) for recipe in recipes]
        for found in as_completed(waiting):
            rows.append(found.result())
            print(rows[-1], flush=True)
            record("loss_200", settings, sorted(rows, key=lambda row: recipes.index(row["recipe"])))


if __name__ == "__main__":
    main()
