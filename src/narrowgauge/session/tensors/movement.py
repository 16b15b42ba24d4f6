"""How far a step moves the weights, in recorded steps alone: ‖w‖ and ‖w' - w‖ / ‖w‖ over everything that is trained.

    before the optimizer's step    ‖w‖, and a copy of w: of all of it up to BUDGET elements, else of every k-th
    after it                       ‖w' - w‖² = Σ over tensors (elements / elements copied) Σ over the copied (w' - w)²

    k   a prime, lest it walk down a column of a matrix; where it begins changes from one recorded step to the next

So no more than BUDGET elements are held, and only while the optimizer steps; copies of a small model keep their memory
from one recorded step to the next, because asking for it anew takes as long as filling it. w is what the optimizer was
given: masters in float32 where the program keeps them there, else the weights as they are rounded. Sharded weights
count as in `norms`.

Whole float32 weights on the CPU are walked: all of them for the norm, and no more than WALKED elements for the update.
There memory is what costs, and it comes in lines of 64 bytes, so of more it is every k-th line that is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.metrics.primes import next_prime
from narrowgauge.observe.stats import host
from narrowgauge.session.tensors.memory import Array, Runs, runs
from narrowgauge.session.tensors.norms import Parts, Squares, cut_by_fsdp, named, squares
from narrowgauge.session.tensors.shares import group_of

BUDGET = 1 << 24  # elements: 64 MiB in float32
WALKED = 1 << 18  # the same where a walk copies: 1 MiB, which a processor's cache has room for beside the program's
SMALL = 1 << 20  # 4 MiB
MOST = 4  # optimizers with small models

Array32 = npt.NDArray[np.float32]


class Room:
    """Memory for copies of weights."""

    def __init__(self) -> None:
        self._kept: dict[int, Array32] = {}

    def of(self, number: int, elements: int) -> Array32:
        """So many numbers for an optimizer of this number, with whatever is in them."""
        kept = self._kept.get(number)
        if kept is not None and kept.size == elements:
            return kept
        made = np.empty(elements, np.float32)
        if elements <= SMALL:
            if len(self._kept) >= MOST:
                self._kept.clear()
            self._kept[number] = made
        return made


class Walked(NamedTuple):
    """Weights that the walk has copied: they, what they were, and the copies, one behind the other.

    Of each every `stride`-th line from `turn` on; `held` is how many elements of it that makes.
    """

    weights: list[Tensor]
    before: Runs
    partial: bool
    copies: Array32
    starts: Array
    held: Array
    stride: int
    turn: int

    def sum(self, walk: Callable[[Array, Array, Array, Array, int, int], float], now: Runs) -> Squares:
        """What a walk says of the weights and the copies."""
        total = walk(now.ats, self.starts, now.sizes, self.held, self.stride, self.turn)
        return Squares(torch.tensor(total, dtype=torch.float64, device="cpu"), self.partial)


class Movement:
    """The weights of one recorded step, before and after.

    Args:
        turn: where the copied elements begin, if not all are copied.
        budget: how many are, at most.
        room: where copies are put.
    """

    def __init__(self, turn: int = 0, budget: int = BUDGET, room: Room | None = None) -> None:
        self._turn, self._budget, self._room = turn, budget, room or Room()
        # By optimizer: its weights, what was here of them, of how many elements one was copied, and the copies.
        self._held: dict[int, tuple[list[Tensor], Parts, int, list[Tensor]]] = {}
        self._walked: dict[int, Walked] = {}
        self._weights: Squares | None = None
        self._moved: Squares | None = None
        self._early: list[int] = []
        self._lost = False  # some weights could not be looked at when they had moved
        self.share = 1.0  # of the elements that were copied

    @torch.no_grad()
    def before(self, optimizer: Optimizer, *, in_parts: bool = False) -> None:
        """The optimizer is about to step; other ranks hold more of what it trains if `in_parts`."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        alone = host.ready() and not any(map(group_of, weights))  # else some count once for several ranks
        walk = host.kernel() if alone else None
        whole = None if walk is None else runs(weights)
        if walk is not None and whole is not None:
            held = self._walk(optimizer, weights, whole, in_parts or any(map(cut_by_fsdp, weights)), walk.LINE)
            self._weights = held.sum(walk.copied, whole).and_also(self._weights)
            self.share = min(self.share, float(held.held.sum()) / whole.elements)
            self._walked[id(optimizer)] = held
            return
        parts = Parts(weights, in_parts=in_parts)
        elements = sum(x.numel() for x in parts.here)
        total = parts.squares()
        if total is None:
            return
        self._weights = total.and_also(self._weights)
        stride = next_prime(math.ceil(elements / self._budget))
        views = [_every(x, stride, self._turn) for x in parts.here]
        self.share = min(self.share, sum(v.numel() for v in views) / elements)
        self._held[id(optimizer)] = weights, parts, stride, [v.clone() for v in views]

    def _walk(self, optimizer: Optimizer, weights: list[Tensor], whole: Runs, partial: bool, line: int) -> Walked:
        """Room for the copies of weights, and which of their lines go there."""
        stride = next_prime(math.ceil(whole.elements / min(self._budget, WALKED)))
        most = -(-whole.sizes // (line * stride)) * line  # of each, rounded up to whole lines
        copies = self._room.of(id(optimizer), int(most.sum()))
        starts = copies.ctypes.data + 4 * (np.cumsum(most) - most)
        return Walked(weights, whole, partial, copies, starts, np.empty_like(most), stride, self._turn)

    def after(self, optimizer: Optimizer, *, early: bool = False) -> None:
        """It stepped; what was copied is given back. If `early`, at `settle`: the weights are not written yet."""
        self._early.append(id(optimizer))
        if not early:
            self.settle()

    def settle(self) -> bool:
        """What stepped has written its weights; return whether that was still to be looked at."""
        early, self._early = self._early, []
        for number in early:
            self._look(number)
        return bool(early)

    @torch.no_grad()
    def _look(self, number: int) -> None:
        walked, held = self._walked.pop(number, None), self._held.pop(number, None)
        walk = None if walked is None else host.kernel()
        if walked is not None and walk is not None:
            now = runs(walked.weights)  # a step may have put other memory in a weight's place
            if now is None or now.shapes != walked.before.shapes:
                self._lost = True
            else:
                self._moved = walked.sum(walk.moved, now).and_also(self._moved)
        if held is None:
            return
        weights, before, stride, copies = held
        parts = Parts(weights, in_parts=before.partial)
        alike = [_kind(x) for x in parts.here] == [_kind(x) for x in before.here]
        if not alike or any(map(_freed, parts.here)):
            self._lost = True
            return
        views = [_every(x, stride, self._turn) for x in parts.here]
        torch._foreach_sub_(copies, views)
        factors = [x.numel() / v.numel() for x, v in zip(parts.here, views, strict=True)]
        moved = squares(copies, parts.copies, parts.partial, factors, parts.ranks)
        self._moved = self._moved if moved is None else moved.and_also(self._moved)

    def scalars(self) -> dict[str, Tensor]:
        """`param_norm` and `update_ratio`; or, of sharded weights, this rank's part of the squares of both norms."""
        weights, moved = self._weights, self._moved
        if weights is None:
            return {}
        found = named("param", weights)
        if moved is None or self._lost:
            return found
        if moved.partial:
            return found | named("update", moved)
        return found | {"update_ratio": (moved.total.to(weights.total.device) / weights.total).sqrt()}


def _every(x: Tensor, stride: int, turn: int) -> Tensor:
    """A view of every `stride`-th element of x, in the order of its memory; of a scattered x, of all of it."""
    if stride == 1 or not torch.ops.aten.is_non_overlapping_and_dense(x):
        return x
    start = turn % min(stride, x.numel())
    return x.as_strided((x.numel(),), (1,), x.storage_offset())[start::stride]


def _freed(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.device.type in ("cpu", "cuda") and not host.in_memory(x)


def _kind(x: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return x.shape, x.stride(), x.dtype, x.device
