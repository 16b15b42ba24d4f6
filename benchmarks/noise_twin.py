"""How large a breath of noise tells chance from FP8: small programs trained over and over, and judged pair by pair.

    baseline    a program as it is
    twin        the same from weights times 1 + s N(0,1), for each s: its gap makes the band of chance
    harmless    twins of s = 1e-2, other draws, like a rounding to FP8 in size: 5 of 100 should leave the band
    fp8         the baseline in current, rowwise and blockwise scaling
    other       the baseline with 0.8 of its learning rate: another training, which should leave it

A band from a twin that has not come apart from the baseline yet is too narrow, for FP8's own noise is there at once.

    python -m benchmarks.noise_twin [--seeds 12] [--programs mlp-adam mlp-sgd lm-adam lm-bf16 lm-tuned]
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.record import record
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.observe.verdict.gap import Series, noise_band, outcome_of, paired_gap
from narrowgauge.session.models.perturb import perturb

SIZES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
HARMLESS = 1e-2
RECIPES = ("current", "rowwise", "blockwise")
STEPS, LENGTH, BATCH, WIDTH = 400, 32, 8, 32
PROGRAMS = ("mlp-adam", "mlp-sgd", "lm-adam", "lm-bf16", "lm-tuned")
CODES = torch.tensor([ord(c) % 128 for c in inspect.getsource(argparse)])
OTHERS = torch.tensor([ord(c) % 128 for c in inspect.getsource(tarfile)])


class Block(nn.Module):
    """A layer of a transformer with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, WIDTH], and the same of what comes out."""
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(B, T, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, WIDTH)
        x = x + self.out(y)
        z: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + z


def classifier() -> nn.Module:
    """Of numbers, [B, 16], into ten classes."""
    widths = (16, 64, 64, 64)
    inner = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(64, 10))


def language_model() -> nn.Module:
    """Of characters, [B, T]."""
    blocks = [Block() for _ in range(2)]
    return nn.Sequential(nn.Embedding(128, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128))


def classes(teacher: nn.Module, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches that a fixed network has put into classes, not always rightly."""
    while True:
        x = torch.randn(32, 16, generator=generator)
        yield x, (teacher(x) + 0.3 * torch.randn(32, 10, generator=generator)).argmax(1)


def text(codes: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a text, and their next characters."""
    while True:
        starts = torch.randint(len(codes) - LENGTH, (BATCH,), generator=generator)
        pieces = torch.stack([codes[at : at + LENGTH + 1] for at in starts.tolist()])
        yield pieces[:, :-1], pieces[:, 1:]


def fit(
    model: nn.Module, data: Iterator[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer, steps: int, *, low: bool
) -> list[float]:
    """Each step's loss."""
    losses = []
    for x, y in islice(data, steps):
        with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
            logits = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(
    program: str, seed: int, *, noise: float = 0.0, draw: int = 0, recipe: str = "", rate: float = 1.0
) -> Series:
    """A program's losses: always from the same weights and data, but for what is asked for."""
    kind, _, how = program.partition("-")
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    if kind == "mlp":
        model, teacher = classifier(), classifier()
        for p in teacher.parameters():
            p.data *= 3
        data = classes(teacher, generator)
    else:
        model, data = language_model(), text(OTHERS if how == "tuned" else CODES, generator)
        if how == "tuned":  # what is pretrained is the same in all of them
            before = text(CODES, torch.Generator().manual_seed(seed))
            fit(model, before, torch.optim.AdamW(model.parameters(), 3e-3), STEPS, low=False)
    if noise:
        perturb(model, noise, 1000 * draw)
    if recipe:
        ng.convert(model, recipe=ng.recipes.by_name(recipe))
    if how == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.05 * rate, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), (1e-3 if how == "tuned" else 3e-3) * rate)
    losses = fit(model, data, optimizer, STEPS, low=how == "bf16")
    return Series(np.arange(1, STEPS + 1), np.array(losses))


def told(gaps: Sequence[float], bands: Sequence[float]) -> str:
    """How many gaps left their bands, and how many of those are worse than a pass."""
    left = sum(abs(gap) > band for gap, band in zip(gaps, bands, strict=True))
    judged = [outcome_of(gap, band) for gap, band in zip(gaps, bands, strict=True)]
    worse = sum(outcome in ("watch", "fail") for outcome in judged)
    return f"{left} ({worse}) of {len(gaps)}"


def judged(program: str, seeds: int) -> Iterator[dict[str, Any]]:
    """A row for each size of the noise."""
    made = partial(trained, program)
    variants: dict[str, list[Callable[[int], Series]]] = {
        "harmless": [partial(made, noise=HARMLESS, draw=draw) for draw in (2, 3)],
        "fp8": [partial(made, recipe=name) for name in RECIPES],
        "other": [partial(made, rate=0.8)],
    }
    gaps: dict[str, list[float]] = {kind: [] for kind in variants}
    bands: dict[float, list[float]] = {size: [] for size in SIZES}
    for seed in range(seeds):
        base = made(seed)
        for size, found in bands.items():
            found.append(noise_band(made(seed, noise=size, draw=1), base) or 0.0)
        for kind, each in variants.items():
            found_gaps = [paired_gap(one(seed), base) for one in each]
            gaps[kind] += [gap.pct for gap in found_gaps if gap is not None]
    for size, found in bands.items():
        row: dict[str, Any] = {"program": program, "noise": size, "band_pct": round(statistics.median(found), 3)}
        for kind, of_kind in gaps.items():
            row[kind] = told(of_kind, [band for band in found for _ in variants[kind]])
        yield row
    means = {kind: round(statistics.fmean(of_kind), 3) for kind, of_kind in gaps.items()}
    print(program, "mean gaps in percent:", means, flush=True)


def main() -> None:
    """Train, judge, and write the figures down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for program in asked.programs:
        rows += judged(program, asked.seeds)
        record("noise_twin", {"seeds": asked.seeds, "steps": STEPS, "cells": "left the band (watch or fail) of"}, rows)


if __name__ == "__main__":
    main()
