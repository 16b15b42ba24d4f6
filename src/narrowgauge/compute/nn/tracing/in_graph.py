"""What a compiled graph does of a layer's quantizing by itself: ordinary operations, which the compiler merges.

    amax        of x and of dy, where they are made: one read less
    inv_scale   from that amax                                           of one number, or of one per granule
    codes       of x for wgrad, where they are left to the graph         under one scale
    remade      x itself, where lines of it have scales of their own     for a kernel that finds and uses them

All exact, of a given x; one that is made once more may differ in its last digits (docs/fast_path.md).

A compiler keeps float32 between operations that it merges, where ordinary ones would have rounded to the
tensor's dtype; so x is taken by its bits. Its division may be an approximation; in float64, rounded to float32, it is
not: 53 bits are more than twice 24 and two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.compute.nn.tracing.revision import REVISION
from narrowgauge.compute.quant import Block, BLOCK_1x128, Granularity, PerRow, PerTensor, torch_dtype
from narrowgauge.compute.quant.scaling import FLOAT32_MAX, FLOAT32_TINY
from narrowgauge.compute.recipes import Recipe
from narrowgauge.formats import E4M3FN, E5M2

CODES, REMADE = 0, 1
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class Traced:
    """What a graph knows of a layer's recipe, in numbers that an operator takes.

    Args:
        whole: what is saved of the input (CODES, REMADE); is its scale its own, which dtype, a power of two;
            rows and columns of its granule, 0 for all; which code this is.
        real: what an amax is scaled to, and the least amax.
    """

    whole: list[int]
    real: list[float]

    @classmethod
    def of(cls, recipe: Recipe, saves: int) -> Traced:
        """The numbers of a recipe's input. Squares' codes are shared, 1x32 blocks padded: not left; nor is FNUZ."""
        rule = recipe.uses("input")[1]
        per_tensor = rule.granularity == PerTensor()
        granules, formats = (PerTensor(), PerRow(), BLOCK_1x128), (E4M3FN, E5M2)
        again = rule.scaling.e8m0 is None and rule.granularity in granules and rule.fmt in formats
        match rule.granularity:
            case Block(rows, cols):
                grain = [rows, cols]
            case PerRow():
                grain = [1, 0]
            case _:
                grain = [0, 0]
        own_scale = per_tensor and recipe.state == "none"
        kinds = [own_scale, _DTYPES.index(torch_dtype(rule.fmt)), rule.scaling.power_of_two]
        whole = [saves if again else CODES, *(int(kind) for kind in kinds), *grain, REVISION]
        return cls(whole, [rule.fmt.max * 2.0**-rule.margin, rule.scaling.amax_floor])

    @property
    def numbers(self) -> tuple[list[int], list[float]]:
        """Both lists."""
        return self.whole, self.real

    @property
    def saves(self) -> int:
        """What the forward pass saves of its input."""
        return self.whole[0]

    @property
    def own_scale(self) -> bool:
        """Whether a tensor has one scale, made from its own amax."""
        return bool(self.whole[1])

    @property
    def by_lines(self) -> bool:
        """Whether every column of x has a scale of its own for wgrad, or every 128 rows of it."""
        return bool(self.whole[4])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of codes."""
        return _DTYPES[self.whole[2]]

    @property
    def granularity(self) -> Granularity:
        """How many scales."""
        rows, cols = self.whole[4:6]
        return Block(rows, cols) if cols else PerRow() if rows else PerTensor()


def amax_of(x: Tensor) -> Tensor:
    """max |x|, [] float32; 0 of a tensor without elements."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import, and only graphs ask

    magnitudes = _magnitudes(x)
    if not guard_or_false(x.numel() > 0):  # no elements, or perhaps none: nothing has no maximum
        magnitudes = F.pad(magnitudes.reshape(-1), (0, 1))
    return magnitudes.amax().view(x.dtype).float()


def inv_scale_of(amax: Tensor, traced: Traced) -> Tensor:
    """`quant.inv_scale_from_amax` of one amax [], [] float32."""
    goal, floor = traced.real
    healthy = amax < torch.inf
    if floor:
        amax = amax.clamp(min=floor)
    else:
        healthy = healthy & (amax > 0)
    inv_scale = (goal / torch.where(healthy, amax, 1.0).double()).clamp(FLOAT32_TINY, FLOAT32_MAX).float()
    if traced.whole[3]:
        inv_scale = (inv_scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return torch.where(healthy, inv_scale, 1.0)


def codes_of(x: Tensor, inv_scale: Tensor, traced: Traced) -> Tensor:
    """The codes of x under inv_scale [], in x's layout."""
    largest = (E5M2 if traced.dtype == torch.float8_e5m2 else E4M3FN).max
    return (_rounded(x.detach()) * inv_scale).clamp(-largest, largest).to(traced.dtype)


def remade(x_MK: Tensor) -> Tensor:
    """x itself, by an operation that a compiler can merge with what makes x, and does not see through.

    Of a copy it would make nothing, and what a kernel reads as it is it would rather keep from forward to backward.
    """
    x_MK = x_MK.detach()
    return torch.copysign(x_MK, x_MK)


def _magnitudes(x: Tensor) -> Tensor:
    """|x| as integers, which are ordered as the numbers are and NaN above all; float64 as it is."""
    integers = _integers(x)
    return x.detach().abs() if integers is None else x.detach().view(integers) & torch.iinfo(integers).max


def _rounded(x: Tensor) -> Tensor:
    """x as float32, rounded to its own dtype first, whatever a compiler would rather do."""
    if x.dtype == torch.bfloat16:
        return (x.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    integers = _integers(x)
    return (x if integers is None else x.view(integers).view(x.dtype)).float()


def _integers(x: Tensor) -> Any:
    """What to see x's bits as; None for float64, which a compiler keeps as it is."""
    return {2: torch.int16, 4: torch.int32}.get(x.element_size())
