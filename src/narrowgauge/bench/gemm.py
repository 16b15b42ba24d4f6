"""One linear layer's products in every precision: TFLOP/s, share of the ceiling, and speed-up over BF16.

    TFLOP/s = 2 M N K / median                 of ceiling = that / the device's best in the same precision

Operands are quantized beforehand, in the layout that the product wants; so this is what FP8 could gain at most, and the
sweep (`sweep`) says what is left of it when quantizing is paid for. `fast` is Hopper's short accumulator, which recipes
allow in fprop only. With a peer there are two more rows per layer, of whole layers with their casts (`layers`).

Legend: M = tokens, N = output features, K = input features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from narrowgauge.bench.ceilings import Ceilings, measure_ceilings
from narrowgauge.bench.layers import PASSES, layer_calls, layers
from narrowgauge.bench.operands import GEMMS, Tensors, gemm_call, native
from narrowgauge.bench.peer_casts import check_casts
from narrowgauge.bench.result import Result, Row, figures
from narrowgauge.bench.shapes import COMPARED, products, sized
from narrowgauge.bench.timing import interleave
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, ROWWISE, Recipe

Shape = tuple[int, int, int]  # M, N, K
SMALL = {"small": (128, 256, 128)}
HIGH = ("bf16", "fp16", "fp32", "tf32")
FP8: Mapping[str, tuple[Recipe, bool]] = {
    "tensorwise fast": (CURRENT, True),
    "tensorwise": (CURRENT, False),
    "rowwise fast": (ROWWISE, True),
    "rowwise": (ROWWISE, False),
    "blockwise": (BLOCKWISE, False),
}


def default_shapes(device: torch.device) -> dict[str, Shape]:
    """(M, N, K) of the linear layers of both compared models; one small shape on a CPU."""
    if device.type != "cuda":
        return dict(SMALL)
    return {f"{size} {layer}": shape for size in COMPARED for layer, shape in products(sized(size)).items()}


def bench_gemm(
    device: torch.device,
    *,
    shapes: Mapping[str, Shape] | None = None,
    rounds: int = 10,
    peer: str | None = None,
) -> Result:
    """Measure fprop, dgrad and wgrad of every named (M, N, K); one row per product.

    With a peer also the whole layer's forward and its step. Raises UsageError for a peer that is not there.
    """
    if peer is not None:
        check_casts("gemm", peer)
    chosen = shapes or default_shapes(device)
    ceilings = measure_ceilings(device)
    rows, notes = [], []
    for kind, (recipe, _) in FP8.items():
        if native(recipe, device) is None:
            notes.append(f"{kind}: not measured, this device has no native FP8 product of that kind.")
    before = torch.get_float32_matmul_precision()
    try:
        for name, (M, N, K) in chosen.items():
            tensors = Tensors.random(M, N, K, device)
            whole = layers(tensors, peer) if peer is not None else {}
            for gemm in (*GEMMS, *(PASSES if whole else ())):
                alone = gemm in GEMMS
                calls = kinds(gemm, tensors, device) if alone else layer_calls(whole, tensors, gemm)
                took = interleave(calls, device, rounds=rounds, lead=1, cold=device.type == "cuda")
                flops = 2.0 * M * N * K * (1 if alone else PASSES[gemm])
                rows.append(
                    {"layer": name, "gemm": gemm, "M": M, "N": N, "K": K}
                    | _columns({kind: timing.median for kind, timing in took.items()}, flops, ceilings)
                    | {"spread_us": {k: [figures(1e3 * t.p10), figures(1e3 * t.p90)] for k, t in took.items()}}
                )
    finally:
        torch.set_float32_matmul_precision(before)
    settings = {
        "rounds": rounds,
        "cold": device.type == "cuda",
        "out_dtype": "that of the operands, FP8: bfloat16",
        "peer": peer,
    }
    return Result("gemm", settings, rows, ceilings.to_dict(), notes)


def kinds(gemm: str, tensors: Tensors, device: torch.device) -> dict[str, Callable[[], object]]:
    """The product in every precision that this device has, by name."""
    calls: dict[str, Callable[[], object]] = {"bf16": tensors.product(gemm)}
    calls["fp16"] = _as(tensors, torch.float16).product(gemm)
    single = _as(tensors, torch.float32).product(gemm)
    calls["fp32"] = _at(single, "highest")
    if device.type == "cuda":
        calls["tf32"] = _at(single, "high")
    for kind, (recipe, fast) in FP8.items():
        backend = native(recipe, device)
        if backend is not None:
            calls[kind] = gemm_call(recipe, gemm, tensors, backend, fast)
    return calls


def _as(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return Tensors(tensors.input.to(dtype), tensors.weight.to(dtype), tensors.grad_output.to(dtype))


def _at(call: Callable[[], Tensor], precision: str) -> Callable[[], object]:
    def at() -> object:
        torch.set_float32_matmul_precision(precision)
        return call()

    return at


def _columns(ms: Mapping[str, float], flops: float, ceilings: Ceilings) -> Row:
    def share(kind: str) -> float | None:
        ideal = ceilings.seconds(flops, kind if kind in HIGH else "fp8")
        return None if ideal is None else figures(1e5 * ideal / ms[kind], 3)

    return {
        "us": {kind: figures(1e3 * value) for kind, value in ms.items()},
        "tflops": {kind: figures(flops / value / 1e9) for kind, value in ms.items()},
        "of_ceiling_pct": {kind: share(kind) for kind in ms},
        "x_bf16": {kind: figures(ms["bf16"] / value) for kind, value in ms.items()},
    }
