"""Copies of weights that are nothing but memory, by which a step's update is measured: where they go, and by what.

    CPU    the compiled walk copies lines of float32 weights, WALKED elements at most (`observe.stats.host_moved`)
    GPU    a kernel copies elements (`compute.kernels.fused.moved`)

Where weights lie is found out anew only when they have moved: to plan takes longer than to copy a small model. Copies
of a small model on the CPU keep their memory from one recorded step to the next, because asking for it anew takes as
long as filling it; on a GPU torch keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.metrics.primes import stride_over
from narrowgauge.observe.stats import device, host, team
from narrowgauge.session.tensors.memory import Array, Runs, runs

if TYPE_CHECKING:
    from narrowgauge.compute.kernels.fused.moved import Copies

WALKED = 1 << 17  # elements: half a MiB, which a cache has room for beside what is the program's
SMALL = 1 << 20  # 4 MiB
MOST = 16  # optimizers that are remembered

Array32 = npt.NDArray[np.float32]


class Walked(NamedTuple):
    """Where weights are that the walk copies, and where it puts the copies, one behind the other.

    Of each every `stride`-th line, which makes `held` elements of it. No weight is held by it.
    """

    walk: ModuleType
    whole: Runs
    budget: int
    copies: Array32
    starts: Array
    held: Array
    stride: int

    def copy(self, turn: int) -> tuple[float, None]:
        """Copy them: the sum of squares of all elements, and copies that are not kept here."""
        whole, at = self.whole, team.address()
        return self.walk.copied(whole.ats, self.starts, whole.sizes, self.stride, turn, self.held, at), None

    def moved(self, now: Runs, turn: int, copies: None) -> float:
        """The sum of squares of what they have moved by."""
        squares: float = self.walk.moved(now.ats, self.starts, now.sizes, self.stride, turn)
        return squares

    @property
    def share(self) -> float:
        """Of the elements, that was copied last."""
        # Between a program's own operations numpy's sum takes five times as long.
        return sum(self.held.tolist()) / self.whole.elements if self.stride > 1 else 1.0


class Launched(NamedTuple):
    """The same of what a kernel copies, of which every `stride`-th element is copied."""

    whole: Runs
    budget: int
    copies: Copies

    def copy(self, turn: int) -> tuple[Tensor, Tensor]:
        """Copy them: the sum of squares of all elements, [] float64, and the copies."""
        with torch.cuda.device(self.whole.kinds[2]):
            return self.copies.copy(self.whole.numbers, turn)

    def moved(self, now: Runs, turn: int, copies: Tensor) -> Tensor:
        """The sum of squares of what they have moved by, [] float64."""
        with torch.cuda.device(self.whole.kinds[2]):
            return self.copies.moved(now.numbers, turn, copies)

    @property
    def share(self) -> float:
        """Of the elements, that is copied."""
        return self.copies.elements / self.whole.elements


class Room:
    """Memory for copies of weights, and the plans by which they are copied, for a few optimizers by their numbers."""

    def __init__(self) -> None:
        self._kept: dict[int, Array32] = {}
        self._plans: dict[int, Walked | Launched] = {}

    def of(self, number: int, elements: int) -> Array32:
        """So many numbers for an optimizer of this number, with whatever is in them."""
        kept = self._kept.get(number)
        if kept is not None and kept.size == elements:
            return kept
        made = np.empty(elements, np.float32)
        if elements <= SMALL:
            if len(self._kept) >= MOST:
                oldest = next(iter(self._kept))
                del self._kept[oldest]
                self._plans.pop(oldest, None)
            self._kept[number] = made
        return made

    def plan(self, number: int, weights: list[Tensor], budget: int) -> Walked | Launched | None:
        """How weights are copied that are nothing but memory, else None; the last plan if it still holds."""
        known = self._plans.get(number)
        whole = runs(weights, None if known is None else known.whole)
        if whole is None:
            return None
        if whole.kinds[2].type == "cpu":
            walk = host.kernel() if host.ready() else None
            return None if walk is None else self._walked(number, walk, whole, min(budget, WALKED), known)
        return self._launched(number, whole, budget, known) if device.ready(whole.kinds[2]) else None

    def _walked(
        self, number: int, walk: ModuleType, whole: Runs, budget: int, known: Walked | Launched | None
    ) -> Walked:
        if isinstance(known, Walked) and whole is known.whole and budget == known.budget:
            return known
        stride = stride_over(widths(whole.kinds[0]), math.ceil(whole.elements / budget), walk.LINE)
        lines = -(-whole.sizes // walk.LINE)
        most = np.where(lines <= walk.FEW, lines, -(-lines // stride)) * walk.LINE  # of each, in whole lines
        copies = self.of(number, int(most.sum()))
        starts = copies.ctypes.data + 4 * (np.cumsum(most) - most)
        plan = Walked(walk, whole, budget, copies, starts, np.empty_like(most), stride)
        if self._kept.get(number) is copies:
            self._plans[number] = plan
        return plan

    def _launched(self, number: int, whole: Runs, budget: int, known: Walked | Launched | None) -> Launched:
        if isinstance(known, Launched) and whole.kinds == known.whole.kinds and budget == known.budget:
            plan = known._replace(whole=whole)
        else:
            stride = stride_over(widths(whole.kinds[0]), math.ceil(whole.elements / budget))
            plan = Launched(whole, budget, device.copies(whole.sizes.tolist(), whole.kinds[1], whole.kinds[2], stride))
            if len(self._plans) >= MOST:
                del self._plans[next(iter(self._plans))]
        self._plans[number] = plan
        return plan


def widths(shapes: Iterable[tuple[int, ...]]) -> set[int]:
    """Of the rows that tensors consist of, and those of their outermost dimension."""
    return {n for shape in shapes if len(shape) > 1 for n in (shape[-1], math.prod(shape[1:])) if n}
