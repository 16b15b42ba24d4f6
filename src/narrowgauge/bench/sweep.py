"""The map "where FP8 pays": one layer over a grid of M, K and N, in every recipe, over BF16.

    forward_gemm   fprop alone                               t_bf16 / t_fp8
    forward        fprop, with input and weight quantized for it
    step_gemm      fprop, dgrad and wgrad
    step           the same, with all three operands quantized for all three

Parts are timed one by one with cold caches and added up, because one by one no launch is waited for: the map is that of
a compiled or captured step, not of an eager one. The weight is quantized in every step; what a fused producer would
save is not counted. `step` is what `convert(..., skip_slow=True)` reads.

Legend: M = tokens, N = output features, K = input features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch

from narrowgauge.bench.operands import GEMMS, Tensors, gemm_call, native, quantizer
from narrowgauge.bench.result import Result, Row, figures
from narrowgauge.bench.timing import interleave
from narrowgauge.compute.kernels import BACKENDS
from narrowgauge.compute.recipes import ROLES, Recipe, by_name
from narrowgauge.errors import UsageError

TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)  # M
SIDES = (512, 1024, 2048, 4096, 8192, 16384)  # K and N
SMALL = ((128, 256), (128, 256))
Parts = dict[str, float]  # part -> milliseconds


def bench_sweep(
    device: torch.device,
    *,
    recipes: Sequence[str] = ("current", "delayed", "rowwise", "blockwise"),
    tokens: Sequence[int] = (),
    sides: Sequence[int] = (),
    rounds: int = 5,
) -> Result:
    """Measure the map; one row per recipe and shape. On a CPU a tiny one, in which FP8 is emulated.

    Raises UsageError where a GPU runs none of the recipes natively.
    """
    small = device.type != "cuda"
    Ms, sides = tuple(tokens) or (SMALL[0] if small else TOKENS), tuple(sides) or (SMALL[1] if small else SIDES)
    known = {recipe.name: recipe for recipe in map(by_name, recipes)}
    able = {name: recipe for name, recipe in known.items() if small or native(recipe, device)}
    if not able:
        raise UsageError(f"this GPU multiplies none of {', '.join(known)} natively, so there is no map to draw.")
    quantized: Parts = {}  # depends on two of the three sides, so most shapes find it here
    rows: list[Row] = []
    for M, K, N in product(Ms, sides, sides):
        tensors = Tensors.random(M, N, K, device)
        rows += _shape(tensors, able, device, quantized, rounds)
    notes = [f"{name}: left out, this GPU does not multiply it natively." for name in known if name not in able]
    settings = {"rounds": rounds, "cold": not small, "M": list(Ms), "K": list(sides), "N": list(sides)}
    return Result("map", settings, rows, notes=notes)


def _shape(
    tensors: Tensors, recipes: dict[str, Recipe], device: torch.device, quantized: Parts, rounds: int
) -> list[Row]:
    calls: dict[str, Callable[[], object]] = {f"bf16 {gemm}": tensors.product(gemm) for gemm in GEMMS}
    for name, recipe in recipes.items():
        backend = native(recipe, device) or BACKENDS["reference"]
        for gemm in GEMMS:
            calls[f"{_family(recipe)} {gemm}"] = gemm_call(recipe, gemm, tensors, backend)
        for role in ROLES:
            x = getattr(tensors, role)
            for turned in (False, True) if role != "grad_output" else (True,):
                key = _key(name, role, x, turned)
                if key not in quantized:
                    calls[key] = quantizer(recipe, role, x, backend, turned)
    took = interleave(calls, device, rounds=rounds, lead=1, cold=device.type == "cuda")
    ms = {key: timing.median for key, timing in took.items()}
    quantized |= {key: value for key, value in ms.items() if "quantize" in key}
    return [_row(name, recipe, tensors, ms | quantized) for name, recipe in recipes.items()]


def _row(name: str, recipe: Recipe, tensors: Tensors, ms: Parts) -> Row:
    (M, K), N = tensors.input.shape, tensors.weight.shape[0]
    family = _family(recipe)
    fprop, step = ms[f"{family} fprop"], sum(ms[f"{family} {gemm}"] for gemm in GEMMS)
    alone = sum(ms[_key(name, role, getattr(tensors, role), False)] for role in ROLES[:2])
    both = sum(ms[_key(name, role, getattr(tensors, role), True)] for role in ROLES)
    bf16_fprop, bf16_step = ms["bf16 fprop"], sum(ms[f"bf16 {gemm}"] for gemm in GEMMS)
    return {
        "recipe": name,
        "M": M,
        "K": K,
        "N": N,
        "forward_gemm": figures(bf16_fprop / fprop),
        "forward": figures(bf16_fprop / (fprop + alone)),
        "step_gemm": figures(bf16_step / step),
        "step": figures(bf16_step / (step + both)),
        "bf16_us": figures(1e3 * bf16_step),
        "gemm_us": figures(1e3 * step),
        "quantize_us": figures(1e3 * both),
    }


def _key(name: str, role: str, x: torch.Tensor, turned: bool) -> str:
    return f"{name} quantize {role} {tuple(x.shape)} {turned}"


def _family(recipe: Recipe) -> str:
    """Recipes with equal products share one measurement of them: current, delayed and static do."""
    return "tensorwise" if recipe.state != "none" or recipe.name == "current" else recipe.name
