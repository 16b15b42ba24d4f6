"""The packed moments of a tensor: one float64 vector whose slots have names and a merge law.

    vector = [ sums | extremes | (n, mean, M2) groups | gemm sums || SQNR, exponent and range histograms ]
              `------------- head: results carry only this --------'

A vector says everything that the metrics need, so tiles, microbatches and ranks merge by merging vectors:

    sum     a + b
    min     min(a, b),  max  max(a, b)
    group   n, mean, M2 (M3, M4): central moments about the group's own mean, merged after Chan, Golub and
            LeVeque (1979) and, for the third and fourth, Pébay (SAND2008-6212)

`empty()` is the neutral element: merging with it changes nothing. It stands for a rank without data.

A part of zeros alone (amax 0) has no say in scales: its own is what a rule gives to nothing.

All sums are in the tensor's own units: float64 holds the fourth power of 1e-38 and of 1e38 alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from narrowgauge.metrics.bins import EXPONENT_BINS, RANGE_BINS, SQNR_BINS

LAWS = ("sum", "min", "max", "group")


@dataclass(frozen=True)
class Slot:
    """A named stretch of the vector.

    Args:
        name: unique in its layout.
        law: how two of them merge: "sum", "min", "max" or "group" (handled with its group).
        meaning: one sentence.
        width: how many numbers it takes; more than one for histograms.
    """

    name: str
    law: str
    meaning: str
    width: int = 1

    @property
    def neutral(self) -> float:
        """The value that changes nothing when merged."""
        return {"min": np.inf, "max": -np.inf}.get(self.law, 0.0)


@dataclass(frozen=True)
class Layout:
    """Slots in their order in the vector, and which of them form groups of central moments.

    Args:
        head: slots that operands and results both carry.
        tail: slots that only operands carry (histograms).
        groups: tuples of slot names (n, mean, M2) or (n, mean, M2, M3, M4).
    """

    head: tuple[Slot, ...]
    tail: tuple[Slot, ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots in order."""
        return self.head + self.tail

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each slot starts."""
        starts = np.cumsum([0] + [slot.width for slot in self.slots])
        return {slot.name: int(start) for slot, start in zip(self.slots, starts, strict=False)}

    @cached_property
    def widths(self) -> dict[str, int]:
        """How many numbers each slot takes."""
        return {slot.name: slot.width for slot in self.slots}

    @cached_property
    def head_width(self) -> int:
        """Numbers in the head, the whole vector of a result."""
        return sum(slot.width for slot in self.head)

    @cached_property
    def width(self) -> int:
        """Numbers in an operand's vector."""
        return sum(slot.width for slot in self.slots)

    def __getitem__(self, name: str) -> int | slice:
        """Index of a slot in the vector's last axis: a number, or a slice for a histogram."""
        start, width = self.offsets[name], self.widths[name]
        return start if width == 1 else slice(start, start + width)

    def columns(self, law: str) -> tuple[int, ...]:
        """Positions in the vector that merge by `law`."""
        return tuple(self.offsets[slot.name] + i for slot in self.slots if slot.law == law for i in range(slot.width))

    def empty(self, *shape: int) -> npt.NDArray[np.float64]:
        """Neutral vectors, [*shape, width]."""
        return np.broadcast_to(self.neutral, (*shape, self.width)).copy() if shape else self.neutral.copy()

    @cached_property
    def scales(self) -> slice:
        """Where the slots that speak of scales lie, side by side."""
        return slice(self.offsets["scale_n"], self.offsets["scale_max"] + 1)

    @cached_property
    def neutral(self) -> npt.NDArray[np.float64]:
        """One neutral vector, to be read, [width]."""
        return np.concatenate([np.full(slot.width, slot.neutral) for slot in self.slots])


MOMENTS = Layout(
    head=(
        Slot("numel", "sum", "elements, non-finite ones included"),
        Slot("nan_count", "sum", "elements that are NaN"),
        Slot("inf_count", "sum", "elements that are infinite"),
        Slot("amax", "max", "largest magnitude of the finite elements"),
        Slot("amin", "min", "smallest magnitude of the finite elements that are not zero"),
        Slot("n", "group", "finite elements"),
        Slot("mean", "group", "their mean"),
        Slot("m2", "group", "sum of (x - mean)^2 over them"),
        Slot(
            "scaled",
            "sum",
            "finite elements whose scale is finite; underflow and saturation are shares of these",
        ),
        Slot("flushed", "sum", "of these, x != 0 whose code is +-0"),
        Slot("saturated", "sum", "of these, |x| * inv_scale above the format's max * (1 + 2^-20)"),
        Slot("scaled_xx", "sum", "sum of x^2 over them"),
        Slot("flushed_xx", "sum", "sum of x^2 over the flushed ones"),
        Slot("compared", "sum", "elements where x and its dequantized d are both finite"),
        Slot("xx", "sum", "sum of x^2 over the compared elements"),
        Slot("xd", "sum", "sum of x * d over them"),
        Slot("dd", "sum", "sum of d^2 over them"),
        Slot("ee", "sum", "sum of (x - d)^2 over them"),
        Slot("scale_n", "group", "finite scales"),
        Slot("scale_mean", "group", "their mean"),
        Slot("scale_m2", "group", "sum of (scale - mean)^2 over them"),
        Slot("scale_min", "min", "smallest finite scale"),
        Slot("scale_max", "max", "largest finite scale"),
        Slot("amax_ratio", "max", "amax now / amax that the delayed scale assumed"),
        Slot("sample_n", "group", "finite elements of the sampled rows"),
        Slot("sample_mean", "group", "their mean"),
        Slot("sample_m2", "group", "sum of (x - mean)^2 over them"),
        Slot("sample_m3", "group", "sum of (x - mean)^3 over them"),
        Slot("sample_m4", "group", "sum of (x - mean)^4 over them"),
        Slot("gemm_ww", "sum", "gemm check: sum of want^2 over the recomputed results"),
        Slot("gemm_wg", "sum", "gemm check: sum of want * got"),
        Slot("gemm_gg", "sum", "gemm check: sum of got^2"),
        Slot("gemm_ee", "sum", "gemm check: sum of (want - got)^2"),
    ),
    tail=(
        Slot("row_sqnr", "sum", "rows per SQNR bin", SQNR_BINS),
        Slot("col_sqnr", "sum", "columns per SQNR bin", SQNR_BINS),
        Slot("exponents", "sum", "sampled elements per binade", EXPONENT_BINS),
        Slot("block_range", "sum", "sampled elements per binade below their 1x128 block's amax", RANGE_BINS),
    ),
    groups=(
        ("n", "mean", "m2"),
        ("scale_n", "scale_mean", "scale_m2"),
        ("sample_n", "sample_mean", "sample_m2", "sample_m3", "sample_m4"),
    ),
)
