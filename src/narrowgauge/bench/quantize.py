"""How near quantizing comes to the memory's own speed, for every operand of every recipe.

    bytes      = reads * bytes of x + bytes of codes + bytes of scales
    of copy    = (bytes / median) / (bytes read and written by a plain copy of x / its median)

`reads` is 2 where a scale depends on numbers that are still to be read: one scale per tensor that is not given, or rows
with columns. Caches are overwritten before every sample. `reference` is what the project's kernels are bit-equal to.
A peer's casts take their turns between ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch

from narrowgauge.bench.operands import bytes_of, native, quantizer, reads, written_bytes
from narrowgauge.bench.peer_casts import READS, check_casts, peer_casts
from narrowgauge.bench.result import Result, Row, figures
from narrowgauge.bench.timing import Timing, interleave
from narrowgauge.compute.kernels import BACKENDS
from narrowgauge.compute.quant import PerTensor
from narrowgauge.compute.recipes import ROLES, by_name

SHAPES = ((8192, 2048), (8192, 4096), (8192, 8192), (8192, 14336))  # inputs of the layers of 1b and 8b-slice
SMALL = ((128, 256),)


def bench_quantize(
    device: torch.device,
    *,
    recipes: Sequence[str] = ("current", "delayed", "rowwise", "blockwise"),
    shapes: Sequence[tuple[int, int]] = (),
    rounds: int = 20,
    peer: str | None = None,
) -> Result:
    """Measure amax and quantizing on BF16 matrices of the given (rows, columns); one row per shape, recipe and role.

    Raises UsageError for a peer that is not there or has no casts to show.
    """
    if peer is not None:
        check_casts("quantize", peer)
    chosen = tuple(shapes) or (SHAPES if device.type == "cuda" else SMALL)
    rows: list[Row] = []
    for shape in chosen:
        rows += _one_shape(device, shape, recipes, rounds, peer)
    settings = {
        "dtype": "bfloat16",
        "rounds": rounds,
        "recipes": list(recipes),
        "cold": device.type == "cuda",
        "peer": peer,
    }
    return Result("quantize", settings, rows)


def _one_shape(
    device: torch.device, shape: tuple[int, int], recipes: Sequence[str], rounds: int, peer: str | None
) -> list[Row]:
    x = torch.randn(shape, device=device).bfloat16()
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: y.copy_(x)}
    facts: dict[str, tuple[str, str, str, int, int]] = {"copy": ("-", "-", "copy", 1, x.nbytes)}
    for backend in {b.name: b for name in recipes if (b := native(by_name(name), device))}.values():
        calls[f"amax {backend.name}"] = partial(backend.amax, x, PerTensor())
        facts[f"amax {backend.name}"] = ("-", "amax", backend.name, 1, 4)
    for name, role in product(recipes, ROLES):
        recipe = by_name(name)
        backends = [b for b in (native(recipe, device), BACKENDS["reference"]) if b is not None]
        for backend in backends:
            key = f"{recipe.name} {role} {backend.name}"
            calls[key] = quantizer(recipe, role, x, backend)
            size = written_bytes(*quantizer(recipe, role, x, backend)())
            facts[key] = (recipe.name, role, backend.name, reads(recipe, role), size)
    for (name, role), cast in (peer_casts(x) if peer is not None else {}).items():
        key = f"{peer} {name} {role}"
        calls[key] = cast
        facts[key] = (name, role, str(peer), READS, bytes_of(*cast()))
    took = interleave(calls, device, rounds=rounds, lead=2, cold=device.type == "cuda")
    copied = 2 * x.nbytes / took["copy"].median
    return [_row(shape, facts[key], took[key], x.nbytes, copied) for key in calls]


def _row(
    shape: tuple[int, int], facts: tuple[str, str, str, int, int], timing: Timing, nbytes: int, copied: float
) -> Row:
    recipe, role, backend, times, size = facts
    moved = times * nbytes + size
    return {
        "shape": "x".join(map(str, shape)),
        "recipe": recipe,
        "operand": role,
        "by": backend,
        "reads": times,
        "us": figures(1e3 * timing.median),
        "p10": figures(1e3 * timing.p10),
        "p90": figures(1e3 * timing.p90),
        "tbytes_per_s": figures(moved / timing.median / 1e9),
        "of_copy_pct": figures(100 * moved / timing.median / copied, 3),
    }
