"""A product of our own where cuBLAS is slowest: 1x128 scales on both sides, as blockwise wgrad has them.

    y_PQ = sum over blocks of 128 along C:  scale_a[p] scale_b[q] <a[p], b[q]>        accumulated in float32

of FP8 codes a [P, C] and b [Q, C], both row-major, with scales [P, C/128] and [Q, C/128]. Beside cuBLAS's of the same
kind, with 128x128 scales on one side, and with one scale per tensor; the layers of 8b-slice, medians in turn.

    python -m benchmarks.gpu_own_gemm [--rounds 12]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from benchmarks.record import record
from torch import Tensor

from narrowgauge.compute.kernels.scaled_mm import ScaledMM
from narrowgauge.compute.quant import CURRENT_POW2, BLOCK_1x128, BLOCK_128x128, PerTensor, QTensor
from narrowgauge.compute.quant import quantize as exact
from narrowgauge.formats import E4M3FN

TOKENS = 8192
LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # N, K: wgrad is [N, TOKENS] by [K, TOKENS]
TILES = tuple(product((128,), (128, 256), (4, 8), (3, 4)))  # rows, columns, warps, stages
GROUP = 8  # rows of tiles that share columns in the cache


@triton.jit
def _own(
    a_ptr, b_ptr, sa_ptr, sb_ptr, y_ptr, P, Q, C, BLOCKS: tl.constexpr,
    TP: tl.constexpr, TQ: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(P, TP), tl.cdiv(Q, TQ)
    first = pid // (GROUP * columns) * GROUP
    high = tl.minimum(rows - first, GROUP)
    at_p, at_q = first + pid % (GROUP * columns) % high, pid % (GROUP * columns) // high
    p, q = at_p * TP + tl.arange(0, TP), at_q * TQ + tl.arange(0, TQ)
    c = tl.arange(0, 128)
    a_at = a_ptr + p.to(tl.int64)[:, None] * C + c[None, :]
    b_at = b_ptr + q.to(tl.int64)[None, :] * C + c[:, None]
    y = tl.zeros((TP, TQ), tl.float32)
    for block in range(BLOCKS):
        scale_a = tl.load(sa_ptr + block * P + p)
        scale_b = tl.load(sb_ptr + block * Q + q)
        y += tl.dot(tl.load(a_at), tl.load(b_at)) * scale_a[:, None] * scale_b[None, :]
        a_at += 128
        b_at += 128
    tl.store(y_ptr + p.to(tl.int64)[:, None] * Q + q[None, :], y.to(tl.bfloat16))


def own(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, tile: tuple[int, int, int, int]) -> Tensor:
    """Codes [P, C], [Q, C] and scales [C/128, P], [C/128, Q] to [P, Q] in BF16; all of P, Q, C are multiples."""
    (P, C), Q = a.shape, b.shape[0]
    TP, TQ, warps, stages = tile
    y = torch.empty(P, Q, dtype=torch.bfloat16, device=a.device)
    _own[(triton.cdiv(P, TP) * triton.cdiv(Q, TQ),)](
        a, b, scale_a, scale_b, y, P, Q, C, BLOCKS=C // 128, TP=TP, TQ=TQ, GROUP=GROUP, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return y


def milliseconds(call: Callable[[], object]) -> float:
    """One call between two events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def quantized(x: Tensor, granularity: Any) -> QTensor:
    """By the formulas, as the recipes have it."""
    return exact(x, E4M3FN, granularity=granularity, scaling=CURRENT_POW2)


def calls(P: int, Q: int, C: int, device: str) -> tuple[dict[str, Callable[[], Tensor]], Tensor]:
    """By name; and what ours must be near."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, C, device=device) for n in (P, Q))
    a, b = quantized(x, BLOCK_1x128), quantized(w, BLOCK_1x128)
    square, plain = quantized(w, BLOCK_128x128), [quantized(t, PerTensor()) for t in (x, w)]
    scales = [q.scale.t().contiguous() for q in (a, b)]
    backend, out = ScaledMM(), torch.bfloat16
    found: dict[str, Callable[[], Tensor]] = {
        "own " + " ".join(map(str, tile)): partial(own, a.codes, b.codes, *scales, tile) for tile in TILES
    }
    if device == "cuda":
        found["cuBLAS 1x128 by 1x128"] = partial(backend.gemm, a, b, out)
        found["cuBLAS 1x128 by 128x128"] = partial(backend.gemm, a, square, out)
        found["cuBLAS one scale"] = partial(backend.gemm, *plain, out)
    return found, a.dequantize() @ b.dequantize().t()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="no GPU here, so nothing was measured\n")
    table = []
    for N, K in LAYERS:
        found, want = calls(N, K, TOKENS, "cuda")
        times: dict[str, list[float]] = {}
        worst = {}
        for name, call in list(found.items()):
            try:
                worst[name] = float((call().float() - want).abs().max() / want.abs().max())
            except triton.runtime.errors.OutOfResources:
                del found[name]
        for round_ in range(args.rounds + 3):
            for name, call in found.items():
                took = milliseconds(call)
                if round_ >= 3:
                    times.setdefault(name, []).append(took)
        for name, each in times.items():
            ms = statistics.median(each)
            row = {"layer": f"{N}x{K}", "what": name, "ms": round(ms, 4), "TFLOPS": round(2e-9 * N * K * TOKENS / ms)}
            table.append(row | {"worst": f"{worst[name]:.1e}"})
    record("own_gemm", {"rounds": args.rounds, "tokens": TOKENS}, table)


if __name__ == "__main__":
    main()
