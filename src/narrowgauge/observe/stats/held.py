"""What one device holds of an open step: what was counted of its operands and results, until all is packed at the end.

    look, judge_there    a GPU's kernels count, into room that lasts from step to step
    operand, judge       tallies, one set per microbatch
    weights              the same in every microbatch: one look says it all
    operands, results    at the end, as one tensor each

Whoever calls guards: what goes wrong in here passes through.
"""

from __future__ import annotations

import threading
from _thread import RLock
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from narrowgauge.compute.quant import QTensor
from narrowgauge.errors import UsageError
from narrowgauge.observe.stats import host
from narrowgauge.observe.stats.device import count
from narrowgauge.observe.stats.guard import Marks
from narrowgauge.observe.stats.moments import shares, tallies_of
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


class Held:
    """Of one device and one step.

    Args:
        turn: watched steps before it: which rows the histograms are taken from.
        expected: sites that will be counted on the CPU.
        looks: the device's room for what kernels count, made when it is first asked for.
        by_kernels: whether it is a GPU whose kernels count.
        lock: of what is in here; on a GPU, backward runs in a thread of its own.

    Attributes:
        packer: what was counted of operands, but by kernels.
        room: where kernels count, once one did.
        weights: sites of those that were looked at.
        met: of how many tensors it was asked whether they are timed, and `turn`, so that in every step others are.
    """

    def __init__(
        self,
        turn: int,
        expected: int,
        looks: Callable[[], Looks],
        *,
        by_kernels: bool = False,
        lock: RLock | None = None,
    ) -> None:
        self.by_kernels = by_kernels
        self.marks: Marks = []
        self.packer = Packer(expected)
        self._results: dict[str, list[Tensor | host.Array]] = {}
        self.weights: set[str] = set()
        self.turn, self._looks = turn, looks
        self.room: Looks | None = None
        self.met = turn
        self.lock = lock or threading.RLock()

    def is_timed(self) -> bool:
        """Whether the next tensor is; of the first step, the first."""
        self.met += 1
        return self.met % TIMED == 1

    @property
    def times(self) -> int:
        """For how many tensors one that is timed stands. In the first step it is itself alone: kernels are compiled."""
        return TIMED if self.turn else 1

    def look(self, site: str, role: str, x: Tensor, rule: Operand, turned: bool) -> Any | None:
        """Room for what a kernel counts of an operand while it quantizes it; None where `operand` has to look."""
        if self._seen(site, role):
            return None
        with self.lock:
            self.room = self.room or self._looks()
            look = self.room.open(site, x, rule, self.turn, turned)
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
            with self.lock:
                self.packer.add_packed(site, moments)
            return True
        counted = tallies_of(x, q, self.turn, self.packer.room)
        with self.lock:
            self.packer.add(site, counted, amax_ratio)
        return True

    def judge(self, site: str, role: str, x: Tensor, rule: Operand) -> bool:
        """Count on the CPU what `rule` would make of x [M, K], not empty; False where it has to be made."""
        once = role == "weight"
        if once and site in self.weights:
            return True
        if not host.ready():
            return False
        counted = host.judge(x, rule, *shares(x.shape[0], x.shape[1], self.turn), self.packer.room())
        if counted is None:  # not all of it is finite
            return False
        with self.lock:
            self.packer.add_counted(site, counted)
        if once:
            self.weights.add(site)
        return True

    def judge_there(self, site: str, role: str, x: Tensor, rule: Operand, given: Given | None) -> bool:
        """The same on a GPU, whose current device it is."""
        once = role == "weight"
        if once and site in self.weights:
            return True
        try:
            with self.lock:
                self.room = self.room or self._looks()
                look = self.room.open(site, x, rule, self.turn, turned=False)
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
            self.weights.add(site)
        return True

    def result(self, site: str, role: str, y: Tensor, check: GemmSample | None) -> bool:
        """Take a gemm's result, and the part of it that was recomputed."""
        vector = result_head(y, check)
        with self.lock:
            self._results.setdefault(site, []).append(vector)
        return True

    @property
    def counted(self) -> int:
        """How many sites were counted on the CPU, each once."""
        return self.packer.counted

    def operands(self, looks: Looks | None) -> Table:
        """Packed moments of all operands; what the device's `looks` have as well, if it has any."""
        with self.lock:  # a thread may be late
            if looks is not None:
                try:
                    pack_looks(self.packer, *looks.pack())
                finally:
                    looks.clear()  # or the next step would hand these over as its own
            return self.packer.pack() if self.packer else ([], None)

    def results(self) -> Table:
        """Packed moments of all results."""
        with self.lock:
            return list(self._results), stack_parts(list(self._results.values())) if self._results else None

    def _seen(self, site: str, role: str) -> bool:
        return role == "weight" and site in self.weights

    def _see(self, site: str, role: str) -> None:
        if role == "weight":
            self.weights.add(site)


def lies_as(x: Tensor, rule: Operand) -> Lies:
    """How x [M, K] lies, to be judged by a rule."""
    from narrowgauge.compute.kernels.fused.watched.looks import asked_of  # triton is slow to import

    return asked_of(x, rule, False), x.stride()
