"""Which scale belongs to a tensor of FP8 codes, and what each of its numbers covers.

    x_ij ≈ codes_ij · scale_g(i,j)        shape of the scale -> granule g

    [], [1], [1, 1]     the tensor                      [N], [N, 1]                   a row
    [E], [E, 1, 1]      the matrix of one expert        [K], [1, K]                   a column
    [..., R, C]         a block, of a usual size if one fits: ceil(N / rows) = R, ceil(K / cols) = C

Every scale is taken to multiply back, whatever it is called: that is what `weight_scale` and `weight_scale_inv` do in
the published FP8 checkpoints. Where TransformerEngine keeps both directions, `scale_inv` is the one that multiplies,
so names with `inv` come first.

Legend: codes [E, N, K] or [N, K]: E = experts, N = output features, K = input features; M = all rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from narrowgauge.compute.quant import Block, Granularity, PerColumn, PerRow, PerTensor, QTensor, format_of
from narrowgauge.observe.inspect.entry import Entry

WORDS = ("scale_inv", "scale")
# (rows, columns) of a block; where several fit a small matrix, the one that more checkpoints have.
BLOCKS = ((128, 128), (1, 128), (1, 32), (1, 64), (1, 16), (64, 64), (32, 32), (256, 256))
# What codes are called where their scale hangs on the module: `weight` and `scale`, `_data` and `_scale`.
LEAVES = ("weight", "codes", "data", "_data", "qweight", "weight_fp8")


def scale_names(name: str) -> Iterator[str]:
    """The names that the scale of the tensor `name` may have, likeliest first."""
    for word in WORDS:
        yield from (f"{name}{link}{word}" for link in ("_", ".", "._"))
    module, dot, leaf = name.rpartition(".")
    if leaf in LEAVES:
        for word in WORDS:
            yield from (f"{module}{dot}{start}{word}" for start in ("", "_"))
        yield f"{module}{dot}scale_{leaf}"


def scale_of(name: str, known: Collection[str]) -> str:
    """The name of the scale of a tensor of codes; "" without one."""
    return next((found for found in scale_names(name) if found in known), "")


def granularity_of(scale: tuple[int, ...], codes: tuple[int, ...]) -> Granularity | None:
    """What one number of a scale covers in codes of that shape, taken as a matrix [M, K]; None if it fits none."""
    if math.prod(scale) == 1:
        return PerTensor()
    if len(codes) < 2:  # a vector is one row
        scale, codes = (1, *scale), (1, *codes)
    *lead, N, K = codes
    outer = scale
    while outer[-1] == 1:
        outer = outer[:-1]
    if len(outer) < len(codes) and outer == codes[: len(outer)]:
        rows = math.prod(codes[len(outer) : -1])
        return PerRow() if rows == 1 else Block(rows, K)
    if math.prod(scale) == scale[-1] == K:
        return PerColumn()
    if len(scale) != len(codes) or list(scale[:-2]) != lead:
        return None
    R, C = scale[-2:]
    if not 0 < R <= N or not 0 < C <= K:
        return None
    divided = ((N // R, K // C),) if N % R == 0 and K % C == 0 else ()
    for rows, cols in (*BLOCKS, *divided):
        # Matrices lie below each other, so a block may not reach from one into the next.
        if -(-N // rows) == R and -(-K // cols) == C and (not lead or N % rows == 0):
            return Block(rows, cols)
    return None


def as_float(scale: Tensor) -> Tensor:
    """A scale as float32; bytes are powers of two, E8M0."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def can_scale(entry: Entry) -> bool:
    """Whether a tensor of this dtype can be a scale."""
    floats = ("float64", "float32", "float16", "bfloat16", "float8_e8m0fnu", "uint8")
    return entry.dtype in floats and entry.numel > 0 and not entry.why_not


def with_scale(codes: Tensor, scale: Tensor | None) -> QTensor | None:
    """Codes [..., K] and their scale as a matrix of codes; one scale of 1 without any; None if they do not fit."""
    granularity = PerTensor() if scale is None else granularity_of(tuple(scale.shape), tuple(codes.shape))
    if granularity is None:
        return None
    K = codes.shape[-1] if codes.dim() else 1
    matrix = codes.reshape(-1, K)
    wide = torch.ones(()) if scale is None else as_float(scale)
    shape = granularity.scale_shape((matrix.shape[0], K))
    return QTensor(matrix, wide.reshape(shape), format_of(codes.dtype), granularity)


def one_per(granularity: Granularity) -> str:
    """What shares a scale, in a word or two: "row", "128x128"."""
    if isinstance(granularity, Block):
        return f"{granularity.rows}x{granularity.cols}"
    return {PerTensor: "tensor", PerRow: "row", PerColumn: "column"}[type(granularity)]
