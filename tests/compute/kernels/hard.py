"""Numbers that are hard to quantize, for the tests of kernels."""

import math

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["normal", "spread", "tiny", "subnormal", "huge", "zeros", "sparse", "ties", "not finite"]


def hard(name, M, K, binades=128):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=g)
    spread = x * torch.exp(4 * torch.randn(M, K, generator=g))
    match name:
        case "spread":
            x = spread
        case "tiny":
            x = spread * 1e-30
        case "subnormal":
            x = x * 1e-39
        case "huge":
            x = x * 1e37
        case "zeros":
            x = x * 0
        case "sparse":
            x = torch.where(x > 1.5, x, 0.0)
        case "ties":  # every midpoint of two codes, and what overflows
            steps = torch.arange(M * K).reshape(M, K) % 4096
            x = torch.ldexp(1 + (steps % 32) / 32, steps // 32 % binades - 20)
        case "far from zero":
            x = x + 1000
        case "not finite":
            x[0, 0], x[M // 2, K // 2], x[-1, -1] = math.inf, math.nan, -math.inf
    return x.to(DEVICE)
