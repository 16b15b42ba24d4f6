"""The watch on a GPU: its numbers against float64, that it never waits for the device, and what it costs.

python -m benchmarks.gpu_check_stats        on an H200: results/gpu_check_stats_h200.txt
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.compute.nn import GemmSample, set_observer
from narrowgauge.metrics import finalize
from narrowgauge.observe.stats import Collector, measure, moments

GRANULARITIES = (ng.PerTensor(), ng.PerRow(), ng.PerColumn(), ng.Block(1, 128), ng.Block(128, 128))


class Notebook:
    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], dict[str, Any]] = {}

    def add_tensors(self, step: int, sites: Any, columns: Any) -> None:
        self.rows |= {(step, s): {name: c[i] for name, c in columns.items()} for i, s in enumerate(sites)}

    def add_event(self, *args: Any, **data: Any) -> None:
        raise AssertionError(f"the watch failed: {args}")


def worst_difference(x: torch.Tensor, q: Any) -> tuple[float, str]:
    """The largest relative difference of a column from the float64 oracle, and whose."""
    found, wanted = finalize(moments(x, q)[None].cpu().numpy()), measure(x, q)
    worst = (0.0, "")
    for name, value in wanted.items():
        a, b = np.asarray(found[name][0], float), np.asarray(value, float)
        if (np.isnan(a) == np.isnan(b)).all() and (np.isinf(a) == np.isinf(b)).all():
            good = np.isfinite(a)
            apart = np.max(np.abs(a - b)[good] / np.maximum(np.abs(b[good]), 1e-6), initial=0.0)
        else:
            apart = np.inf
        worst = max(worst, (float(apart), name))
    return worst


def check_numbers() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 400, generator=g)
    spoiled = x.clone()
    spoiled[3, 4], spoiled[200, 5] = torch.inf, torch.nan
    cases = {"normal": x, "tiny": x * 1e-12, "huge": x * 1e30, "far from zero": x + 1000, "spoiled": spoiled}
    for name, case in cases.items():
        for granularity in GRANULARITIES:
            for fmt in (ng.formats.E4M3FN, ng.formats.E5M2):
                y = case.cuda()
                apart, column = worst_difference(y, ng.quantize(y, fmt, granularity))
                mark = "" if apart < 1e-3 else "   <-- look"
                print(f"{name:14} {fmt.name:7} {granularity!s:26} {apart:.1e} in {column}{mark}")


def check_waiting() -> None:
    """torch raises on any wait for the device while this is on; the collector would log it and count a failure."""
    book = Notebook()
    collector = Collector(book)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    model, _ = ng.convert(model, "delayed", backend="reference")
    set_observer(model, collector)
    x = torch.randn(1024, 256, device="cuda")
    for step in range(3):
        collector.begin_step(step)
        for _ in range(2):
            y = model(x)
            y.backward(torch.ones_like(y))
        collector.end_step()
    y = torch.randn(512, 256, device="cuda")
    q = ng.quantize(y, ng.formats.E4M3FN)
    ratio, sample = y[0, 0].clone(), GemmSample(y, y * 1.5)
    for mode in ("default", "error"):  # constants are made once, which may wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            collector.begin_step(3)
            for _ in range(2):
                collector.operand("a", "input", y, q, amax_ratio=ratio)
                collector.result("a", "output", y, sample)
            collector.end_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    collector.flush()
    print("rows", len(book.rows), "failures", collector.failures, "seconds", round(collector.seconds, 4))
    print("sqnr", book.rows[3, "a:input"]["sqnr_db"], "gain", book.rows[3, "a:output"]["gemm_gain"])


def cost() -> None:
    for shape in ((8192, 4096), (8192, 14336)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        q = ng.quantize(x, ng.formats.E4M3FN)
        for _ in range(3):
            moments(x, q, offset=1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            moments(x, q, offset=1)
        host = (time.perf_counter() - began) / 10
        torch.cuda.synchronize()
        whole = (time.perf_counter() - began) / 10
        peak = torch.cuda.max_memory_allocated() >> 20
        print(
            f"{shape}: host {1e3 * host:.2f} ms, all {1e3 * whole:.2f} ms, {1e9 * whole / x.numel():.3f} ns per element"
        )
        print(f"  peak {peak} MiB for a tensor of {x.numel() * 2 >> 20} MiB")


if __name__ == "__main__":
    cost()
    check_waiting()
    check_numbers()
