"""What one device holds of an open step: what was counted of its operands and results, until all is packed at the end.

    look, judge_there    a GPU's kernels count, into room that lasts from step to step
    operand, judge       tallies, one set per microbatch
    weights              the same in every microbatch: one look says it all
    operands, results    at the end, as one tensor each

Whoever calls guards: what goes wrong in here passes through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.compute.quant import QTensor
from narrowgauge.errors import UsageError
from narrowgauge.observe.stats import host
from narrowgauge.observe.stats.device import count
from narrowgauge.observe.stats.guard import Marks
from narrowgauge.observe.stats.moments import shares, strides, tallies_of
from narrowgauge.observe.stats.packing import Packer, pack_looks, stack_parts
from narrowgauge.observe.stats.results import result_head

if TYPE_CHECKING:
    from narrowgauge.compute.kernels import Given
    from narrowgauge.compute.kernels.fused.watched.looks import Looks
    from narrowgauge.compute.nn import GemmSample
    from narrowgauge.compute.recipes import Operand

TIMED = 16  # tensors, of which one tells how long a GPU works on all: asking takes the host as long as counting does
Table = tuple[list[str], Tensor | None]  # sites and their rows, none if there are none
Lies = tuple[tuple[Any, ...], tuple[int, ...]]  # what a look is asked for, and strides
Timed = Callable[[str, torch.device, "Held"], AbstractContextManager[object]]


class Held:
    """Of one device and one step.

    Args:
        turn: watched steps before it: which rows the histograms are taken from.
        expected: sites that will be counted on the CPU.
        looks: the device's room for what kernels count, made when it is first asked for.
        by_kernels: whether it is a GPU whose kernels count.
    """

    def __init__(self, turn: int, expected: int, looks: Callable[[], Looks], *, by_kernels: bool = False) -> None:
        self.by_kernels = by_kernels
        self.marks: Marks = []
        self._operands = Packer(expected)
        self._results: dict[str, list[Tensor | host.Array]] = {}
        self._weights: set[str] = set()
        self._turn, self._looks = turn, looks
        self._room: Looks | None = None
        self._met = turn  # so that in every step others are timed
        self._lock = threading.Lock()  # on a GPU, backward runs in a thread of its own

    def is_timed(self) -> bool:
        """Whether the next tensor is; of the first step, the first."""
        self._met += 1
        return self._met % TIMED == 1

    @property
    def times(self) -> int:
        """For how many tensors one that is timed stands. In the first step it is itself alone: kernels are compiled."""
        return TIMED if self._turn else 1

    def look(self, site: str, role: str, x: Tensor, rule: Operand, turned: bool) -> Any | None:
        """Room for what a kernel counts of an operand while it quantizes it; None where `operand` has to look."""
        if self._seen(site, role):
            return None
        with self._lock:
            self._room = self._room or self._looks()
            look = self._room.open(site, x, rule, self._turn, turned)
        if look is not None:
            self._see(site, role)
        return look

    def operand(
        self, site: str, role: str, x: Tensor, q: QTensor, moments: Tensor | None, amax_ratio: Tensor | None
    ) -> bool:
        """Take what became of an operand, or its moments if the quantizer made them."""
        if self._seen(site, role):
            return True
        self._see(site, role)
        if moments is not None:
            with self._lock:
                self._operands.add_packed(site, moments)
            return True
        counted = tallies_of(x, q, self._turn, self._operands.room)
        with self._lock:
            self._operands.add(site, counted, amax_ratio)
        return True

    def judge(self, site: str, role: str, x: Tensor, rule: Operand) -> bool:
        """Count on the CPU what `rule` would make of x [M, K], not empty; False where it has to be made."""
        once = role == "weight"
        if once and site in self._weights:
            return True
        if not host.ready():
            return False
        counted = host.judge(x, rule, *shares(x.shape[0], x.shape[1], self._turn), self._operands.room())
        if counted is None:  # not all of it is finite
            return False
        with self._lock:
            self._operands.add_counted(site, counted)
        if once:
            self._weights.add(site)
        return True

    def judge_there(self, site: str, role: str, x: Tensor, rule: Operand, given: Given | None) -> bool:
        """The same on a GPU, whose current device it is."""
        once = role == "weight"
        if once and site in self._weights:
            return True
        try:
            with self._lock:
                self._room = self._room or self._looks()
                look = self._room.open(site, x, rule, self._turn, turned=False)
        except UsageError:  # of more looks than there is room for, the rest is shown
            return False
        if look is None:
            return False
        try:
            count(x, rule, look, given)
        except Exception:
            look.failed = True  # what its room holds is of another step
            raise
        if once:
            self._weights.add(site)
        return True

    def walk(self, x: Tensor, rule: Operand) -> host.Walker | None:
        """What counts tensors on the CPU that lie as x [M, K] does, if something quick can."""
        return host.again(x, rule, strides(x.shape[0], x.shape[1])) if host.ready() else None

    def again(self, site: str, once: bool, x: Tensor, walk: host.Walker) -> bool:
        """`judge` of what came before, and lies as it did; False where that has to be asked."""
        if once and site in self._weights:
            return True
        counted = walk(x, self._turn, self._operands.room())
        if counted is None:
            return False
        with self._lock:
            self._operands.add_counted(site, counted)
        if once:
            self._weights.add(site)
        return True

    def again_there(self, site: str, once: bool, x: Tensor, lies: Lies, given: Given | None, timed: Timed) -> bool:
        """`judge_there` of what came before, and lies as it did; False where that has to be asked.

        `lies` is what a look is asked for of its matrix, and how that lies in memory.
        """
        if once and site in self._weights:
            return True
        asked, strides = lies
        place = x.data_ptr()
        with self._lock:
            room = self._room
            look = None if room is None else room.open_again(site, asked, strides, place, given, self._turn)
        if look is None:
            return False
        again = look.again
        assert again is not None  # or it were none of those
        look.failed = True  # until it is filled: who times it may keep an error for himself
        self._met += 1  # as `is_timed` has it, which takes as long as a name that is looked up
        if self._met % TIMED == 1:
            with timed(site, x.device, self):
                again(x, place, look.numbers)
                look.failed = False
        else:
            again(x, place, look.numbers)
            look.failed = False
        if once and not look.failed:
            self._weights.add(site)
        return True

    def result(self, site: str, role: str, y: Tensor, check: GemmSample | None) -> bool:
        """Take a gemm's result, and the part of it that was recomputed."""
        vector = result_head(y, check)
        with self._lock:
            self._results.setdefault(site, []).append(vector)
        return True

    @property
    def counted(self) -> int:
        """How many sites were counted on the CPU, each once."""
        return self._operands.counted

    def operands(self, looks: Looks | None) -> Table:
        """Packed moments of all operands; what the device's `looks` have as well, if it has any."""
        if looks is not None:
            try:
                pack_looks(self._operands, *looks.pack())
            finally:
                looks.clear()  # or the next step would hand these over as its own
        return self._operands.pack() if self._operands else ([], None)

    def results(self) -> Table:
        """Packed moments of all results."""
        return list(self._results), stack_parts(list(self._results.values())) if self._results else None

    def _seen(self, site: str, role: str) -> bool:
        return role == "weight" and site in self._weights

    def _see(self, site: str, role: str) -> None:
        if role == "weight":
            self._weights.add(site)


def lies_as(x: Tensor, rule: Operand) -> Lies:
    """How x [M, K] lies, to be judged by a rule."""
    from narrowgauge.compute.kernels.fused.watched.looks import asked_of  # triton is slow to import

    return asked_of(x, rule, False), x.stride()
