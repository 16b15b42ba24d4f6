"""What quantize and decode cost: nanoseconds per element, best of many, of a 2048 x 768 tensor.

python benchmarks/quantize.py [--threads N] [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import narrowgauge as ng
from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, E8M0_UP, ROWWISE, decode

SHAPE = (2048, 768)
SCHEMES = [
    (ng.PerTensor(), CURRENT),
    (ng.PerRow(), ROWWISE),
    (ng.PerColumn(), ROWWISE),
    (ng.Block(1, 128), CURRENT_POW2),
    (ng.Block(128, 128), CURRENT_POW2),
    (ng.Block(1, 32), E8M0_UP),
]


def nanoseconds(call: Callable[[], object], device: str, repeats: int = 60) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best / (SHAPE[0] * SHAPE[1]) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.device}, {options.threads} threads, ns per element")
    x = torch.randn(SHAPE, device=options.device)
    for dtype in (torch.float32, torch.bfloat16):
        y = x.to(dtype)
        for granularity, scaling in SCHEMES:
            cost = nanoseconds(
                lambda y=y, g=granularity, s=scaling: ng.quantize(y, ng.formats.E4M3FN, g, scaling=s),
                options.device,
            )
            print(f"quantize  {str(dtype).removeprefix('torch.'):9} {granularity!s:28} {cost:6.2f}")
    for fmt in (ng.formats.E4M3FN, ng.formats.E5M2):
        q = ng.quantize(x, fmt)
        for name, call in [
            ("codes.float()", lambda q=q: q.codes.float()),
            ("decode", lambda q=q: decode(q.codes)),
            ("decode bf16", lambda q=q: decode(q.codes, torch.bfloat16)),
            ("dequantize", lambda q=q: q.dequantize()),
        ]:
            print(f"{name:20} {fmt.name:28}  {nanoseconds(call, options.device):6.2f}")


if __name__ == "__main__":
    main()
