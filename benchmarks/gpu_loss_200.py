"""Two hundred steps of the packaged script: the fast path trains as the reference does, within the reference's noise.

    for each recipe:   fused, compiled      the fast path
                       reference, eager     emulated products, exact quantizing
                       reference, perturbed initial weights times (1 + 1e-6 N): how far two equally good runs part

    |fast - reference| <= 2 |perturbed - reference|      mean validation loss of the last evaluations

python -m benchmarks.gpu_loss_200 [--size small] [--steps 200]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

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

RECIPES = ("current", "delayed", "rowwise", "blockwise")


def train(size: Size, steps: int, recipe: str | None, backend: str | None, compiled: bool, noise: float) -> float:
    """Mean of four evaluations over the last quarter of the steps, nats per byte."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    training, validation = (
        Tokens(text, size.seq, device, name) for text, name in zip(read_corpus(None), ("train", "eval"), strict=True)
    )
    with device:
        model: nn.Module = Llama(size)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, device=device, generator=generator))
    if recipe is not None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    args = parser.parse_args()
    size = replace(SIZES[args.size])
    rows = []
    for recipe in args.recipes.split(","):
        torch._dynamo.reset()
        fast = train(size, args.steps, recipe, None, compiled=True, noise=0.0)
        reference = train(size, args.steps, recipe, "reference", compiled=False, noise=0.0)
        perturbed = train(size, args.steps, recipe, "reference", compiled=False, noise=1e-6)
        gap, band = abs(fast - reference), abs(perturbed - reference)
        row = {
            "recipe": recipe,
            "fast": round(fast, 5),
            "reference": round(reference, 5),
            "perturbed": round(perturbed, 5),
        }
        rows.append(row | {"gap": round(gap, 5), "band": round(band, 5), "within twice": gap <= 2 * band})
    record("loss_200", {"size": args.size, "steps": args.steps}, rows)


if __name__ == "__main__":
    main()
