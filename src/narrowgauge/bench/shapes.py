"""The models and the products that are measured, and how many FLOPs they are.

    a linear layer   fprop  y_MN  = x_MK · w_NK       dgrad  dx_MK = dy_MN · w_NK       wgrad  dw_NK = dyᵀ_NM · x_MK
                     2 M N K each, 6 M N K per step
    attention        forward 2 T² D per sequence and layer (causal: half of 4 T² D), twice that backward

Recomputation inside attention's backward pass, norms, the optimizer and the loss are not counted.

Legend: M = tokens, N = output features, K = input features, T = positions, D = model width.
"""

from __future__ import annotations

from dataclasses import replace

from narrowgauge.scripts import gpt

VOCABULARY = 32768  # of the two models that are compared with others; the packaged script itself reads bytes
COMPARED = ("8b-slice", "1b")
KEPT = "lm_head"


def sized(name: str) -> gpt.Size:
    """The size called `name`, with the vocabulary that its comparison takes."""
    size = gpt.SIZES[name]
    return replace(size, vocab=VOCABULARY) if name in COMPARED else size


def linear_shapes(size: gpt.Size) -> dict[str, tuple[int, int]]:
    """(N, K) of each kind of linear layer in one block."""
    head = size.dim // size.heads
    return {
        "qkv": ((size.heads + 2 * size.kv_heads) * head, size.dim),
        "out": (size.dim, size.dim),
        "gate_up": (2 * size.ffn, size.dim),
        "down": (size.dim, size.ffn),
    }


def products(size: gpt.Size) -> dict[str, tuple[int, int, int]]:
    """(M, N, K) of each kind of linear layer in one block, at the size's own batch."""
    return {name: (size.batch * size.seq, n, k) for name, (n, k) in linear_shapes(size).items()}


def step_flops(size: gpt.Size) -> tuple[float, float]:
    """FLOPs of one training step: those of the blocks' linear layers, and the rest (attention, lm_head)."""
    tokens = size.batch * size.seq
    linear = 6.0 * tokens * size.layers * sum(n * k for n, k in linear_shapes(size).values())
    attention = 3 * 2.0 * size.batch * size.layers * size.seq**2 * size.dim
    return linear, attention + 6.0 * tokens * size.vocab * size.dim
