"""The inputs that `gpu_te_program` drew on a GPU, drawn again without one: what its codes are worth, and in BF16.

torch draws a normal tensor on CUDA by Philox4x32-10: key = seed, counter = (draw, 0, element, 0), two of its four words
into Box-Muller, as long as every element has a thread of its own. The program draws five weights, then an input a step:

    draw      0 1 2 3 4     5 6 7 8 9 10 11     12
              weights       inputs before       the last step's

Printed for a scale of 448 / amax: the SQNR of the codes times their scale, as a product takes them; and of the same
rounded to BF16, as TransformerEngine's `dequantize()` gives them unless it is told otherwise. The transcript goes to
results/.

    python -m benchmarks.te_draw
"""

from __future__ import annotations

import math

import numpy as np
import torch
from benchmarks.record import transcript
from numpy.typing import NDArray
from torch import Tensor

import narrowgauge as ng
from narrowgauge.formats import E4M3FN

WEIGHTS, STEPS, SHAPE = 5, 8, (512, 256)
WORD = np.uint64(0xFFFFFFFF)
Words = NDArray[np.uint64]


def philox(draw: int, elements: int, seed: int = 0) -> list[Words]:
    """Four words of 32 bits for each element (Salmon and others, 2011)."""
    x, y = np.full(elements, draw, np.uint64), np.zeros(elements, np.uint64)
    z, w = np.arange(elements, dtype=np.uint64), np.zeros(elements, np.uint64)
    keys = seed & int(WORD), seed >> 32
    for i in range(10):
        k, m = ((key + i * step) & int(WORD) for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True))
        a, b = np.uint64(0xD2511F53) * x, np.uint64(0xCD9E8D57) * z
        x, y, z, w = (
            (b >> np.uint64(32)) ^ y ^ np.uint64(k),
            b & WORD,
            (a >> np.uint64(32)) ^ w ^ np.uint64(m),
            a & WORD,
        )
    return [x, y, z, w]


def normal(draw: int) -> Tensor:
    """torch.randn of that draw in BF16, but for a few roundings: CUDA's logarithm and sine are of single precision."""
    first, second, _, _ = philox(draw, math.prod(SHAPE))
    u, v = (2 * word.astype(np.float64) + 1 for word in (first, second))
    values = np.sqrt(-2 * np.log(u / 2**33)) * np.sin(2 * np.pi * v / 2**33)
    return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).view(SHAPE)


def worth(x: Tensor, amax: float) -> tuple[float, float]:
    """SQNR in dB of x's codes under 448 / amax, exact and rounded to BF16."""
    q = ng.quantize(x, E4M3FN, scale=amax / E4M3FN.max)
    wide = x.double()
    error = q.dequantize().to(torch.bfloat16).double() - wide
    return ng.measure(x, q)["sqnr_db"], 10 * math.log10(float(wide.square().sum() / error.square().sum()))


def main() -> None:
    *before, x = (normal(WEIGHTS + step) for step in range(STEPS))
    past, amax = [float(t.abs().max()) for t in before], float(x.abs().max())
    lines = [
        f"the last step's input: amax {amax}, std {float(x.double().std(correction=0)):.7f}; amaxes before: {past}"
    ]
    for name, assumed in (
        ("current", amax),
        ("delayed, the largest before", max(past)),
        ("delayed, the newest", past[-1]),
    ):
        exact, rounded = worth(x, assumed)
        lines.append(f"  {name:28} amax {assumed:7.5f}  SQNR {exact:.5f} dB, rounded to BF16 {rounded:.5f} dB")
    moved = [abs(exact - rounded) for exact, rounded in (worth(x, amax + k / 32) for k in range(64))]
    lines.append(
        f"  any amax of BF16 from {amax} to {amax + 63 / 32}: the rounding moves it by {max(moved):.3f} dB at most"
    )
    print("\n".join(lines))
    transcript("te_draw", "python -m benchmarks.te_draw", lines)


if __name__ == "__main__":
    main()
