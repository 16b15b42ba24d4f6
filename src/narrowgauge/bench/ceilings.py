"""What this device reaches at best, measured: the yardstick for every figure in bytes or FLOPs per second.

    copy     bytes read + bytes written per second of a plain copy, 1 GiB each way
    bf16     FLOP/s of one product, 8192 x 8192 x 8192, random operands; so fp16, tf32, fp32
    fp8      the same of E4M3 codes with one scale per tensor and fast accumulation

A datasheet's peak is no ceiling: the clock falls under load and no library reaches it. On a CPU everything is smaller,
and there is no FP8 ceiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from narrowgauge.bench.timing import interleave
from narrowgauge.compute.kernels import BACKENDS
from narrowgauge.compute.quant import quantize
from narrowgauge.compute.recipes import CURRENT


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of a copy, and FLOP/s by precision; None where it was not measured."""

    copy: float
    bf16: float
    fp16: float | None = None
    tf32: float | None = None
    fp32: float | None = None
    fp8: float | None = None

    def seconds(self, flops: float, precision: str) -> float | None:
        """How long `flops` take at the ceiling of that precision."""
        ceiling = getattr(self, precision)
        return None if ceiling is None else flops / ceiling

    def to_dict(self) -> dict[str, Any]:
        """TB/s and TFLOP/s, rounded, with the unit in each name."""
        facts = {f"{name}_tflops": value for name, value in asdict(self).items() if name != "copy"}
        named = {"copy_tbytes": self.copy, **facts}
        return {name: None if value is None else round(value / 1e12, 3) for name, value in named.items()}


def measure_ceilings(device: torch.device, rounds: int = 12) -> Ceilings:
    """Measure them; about a second on a GPU, a few on a CPU."""
    gpu = device.type == "cuda"
    side, words = (8192, 1 << 29) if gpu else (256, 1 << 22)
    x = torch.empty(words, dtype=torch.bfloat16, device=device).normal_()
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: y.copy_(x)}
    a = torch.randn(side, side, device=device)
    for name, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16}.items():
        calls[name] = _product(a.to(dtype))
    calls["fp32"] = _product(a, "highest")
    if gpu and torch.cuda.get_device_capability(device) >= (8, 0):
        calls["tf32"] = _product(a, "high")
    if gpu and BACKENDS["scaled_mm"].supports(CURRENT, device) is None:
        calls["fp8"] = _fp8_product(a)
    before = torch.get_float32_matmul_precision()
    try:
        took = interleave(calls, device, rounds=rounds if gpu else 3, lead=1)
    finally:
        torch.set_float32_matmul_precision(before)
    per_second = {name: 2e3 * side**3 / took[name].median for name in calls if name != "copy"}
    return Ceilings(copy=2e3 * x.nbytes / took["copy"].median, **per_second)


def _product(a: torch.Tensor, precision: str | None = None) -> Callable[[], object]:
    def call() -> object:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        return a @ a.T

    return call


def _fp8_product(a: torch.Tensor) -> Callable[[], object]:
    rule = CURRENT.fprop.a
    q = quantize(a, rule.fmt, rule.granularity, scaling=rule.scaling)
    return lambda: BACKENDS["scaled_mm"].gemm(q, q, torch.bfloat16, fast_accum=True)
