"""Compares the scaled_mm backend with the reference on a GPU: every recipe, every gemm, ragged token counts.

    python benchmarks/gpu_check_gemm.py [--json FILE]

calc_diff = 1 - 2<x,y> / (|x|² + |y|²) between both backends on the same codes: only accumulation may differ.
Then an Fp8Linear forward and backward per backend against float64, as SQNR. Each case is tried by itself: an
error is a line. On an H200: results/gpu_check_gemm_h200.txt.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.compute.kernels import BACKENDS
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.nn.scaling.clock import StepClock
from narrowgauge.compute.nn.scaling.scale_table import ScaleTable
from narrowgauge.compute.quant import QTensor, quantize
from narrowgauge.compute.recipes import CATALOG, Gemm, Operand, Recipe

SHAPES_MNK = [(512, 2048, 1024), (1000, 1024, 1024), (37, 256, 384), (1, 128, 128), (8192, 4096, 4096)]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def calc_diff(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))


def sqnr_db(exact: Tensor, got: Tensor) -> float:
    return float(10 * torch.log10(exact.double().square().sum() / (exact.double() - got.double()).square().sum()))


def milliseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def plain(x: Tensor, rule: Operand) -> QTensor:
    return quantize(x, rule.fmt, rule.granularity, scaling=rule.scaling, margin=rule.margin)


def transposed(x: Tensor, rule: Operand) -> QTensor:
    return quantize(x, rule.fmt, rule.granularity.transposed(), scaling=rule.scaling, margin=rule.margin).T


def operands(recipe: Recipe, m: int, n: int, k: int) -> Iterator[tuple[str, Gemm, QTensor, QTensor]]:
    torch.manual_seed(0)
    x, w, dy = (torch.randn(shape, device="cuda") for shape in ((m, k), (n, k), (m, n)))
    yield "fprop", recipe.fprop, plain(x, recipe.fprop.a), plain(w, recipe.fprop.b)
    yield "dgrad", recipe.dgrad, plain(dy, recipe.dgrad.a), transposed(w, recipe.dgrad.b)
    yield "wgrad", recipe.wgrad, transposed(dy, recipe.wgrad.a), transposed(x, recipe.wgrad.b)


def check_gemms(recipe: Recipe, shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    for name, gemm, a, b in operands(recipe, *shape):
        bf16_a, bf16_b = a.dequantize(torch.bfloat16), b.dequantize(torch.bfloat16)
        for dtype in DTYPES:
            row: dict[str, Any] = {"recipe": recipe.name, "gemm": name, "MNK": shape, "dtype": str(dtype)[6:]}
            try:
                bias = torch.randn(b.shape[0], device="cuda") if name == "fprop" else None

                def run(backend: str, a=a, b=b, dtype=dtype, bias=bias, fast=gemm.fast_accum) -> Tensor:
                    return BACKENDS[backend].gemm(a, b, dtype, bias=bias, fast_accum=fast)

                got, want = run("scaled_mm"), run("reference")
                row["dtype_ok"] = got.dtype == dtype and got.shape == want.shape
                row["calc_diff"] = calc_diff(want, got)
                if dtype == torch.bfloat16 and shape[0] >= 512:
                    row["ms"] = milliseconds(partial(run, "scaled_mm"))
                    row["times_bf16"] = milliseconds(partial(torch.mm, bf16_a, bf16_b.T)) / row["ms"]
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            yield row


def check_poison(recipe: Recipe) -> dict[str, Any]:
    row: dict[str, Any] = {"recipe": recipe.name, "case": "Inf in x leaves a non-finite y"}
    try:
        x, w = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
        x[3, 5] = torch.inf
        y = BACKENDS["scaled_mm"].gemm(plain(x, recipe.fprop.a), plain(w, recipe.fprop.b), torch.bfloat16)
        row["ok"] = not bool(y[3].isfinite().any())
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return row


def check_layer(recipe: Recipe, backend: str, tokens: int) -> dict[str, Any]:
    row: dict[str, Any] = {"recipe": recipe.name, "layer": backend, "M": tokens}
    try:
        torch.manual_seed(0)
        n, k = 2048, 1024
        layer = nn.Linear(k, n, device="cuda")
        nn.init.normal_(layer.weight)
        Fp8Linear.adopt(
            layer,
            name="layer",
            recipe=recipe,
            backend=BACKENDS[backend],
            table=ScaleTable(),
            clock=StepClock(),
        )
        x = torch.randn(tokens, k, device="cuda", requires_grad=True)
        dy = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
        y.backward(dy)
        xd, wd, dyd = x.detach().double(), layer.weight.detach().double(), dy.double()
        row["out"] = sqnr_db(xd @ wd.T + layer.bias.detach().double(), y.detach())
        row["dX"] = sqnr_db(dyd @ wd, x.grad)
        row["dW"] = sqnr_db(dyd.T @ xd, layer.weight.grad)
        row["dtypes"] = [str(t.dtype)[6:] for t in (y, x.grad, layer.weight.grad)]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        row["where"] = traceback.format_exc().splitlines()[-3].strip()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write every row to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; nothing to check")
        return 2
    device = torch.device("cuda", 0)
    head = {
        "device": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    rows: list[dict[str, Any]] = [head]
    print(head)
    for recipe in CATALOG.values():
        reason = BACKENDS["scaled_mm"].supports(recipe, device)
        if reason is not None:
            rows.append({"recipe": recipe.name, "unsupported": reason})
            print(rows[-1])
            continue
        cases = [row for shape in SHAPES_MNK for row in check_gemms(recipe, shape)]
        cases.append(check_poison(recipe))
        cases += [check_layer(recipe, backend, m) for backend in ("scaled_mm", "reference") for m in (512, 333)]
        for row in cases:
            bad = "error" in row or row.get("calc_diff", 0.0) > 1e-4 or row.get("ok") is False
            print("BAD " if bad else "    ", row)
        rows += cases
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    errors = sum("error" in row for row in rows)
    print(f"{len(rows)} rows, {errors} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
