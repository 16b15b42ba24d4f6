"""How far a step moves the weights, in recorded steps alone: ‖w‖ and ‖w' - w‖ / ‖w‖ over everything that is trained.

    before the optimizer's step    ‖w‖, and a copy of w: of all of it up to BUDGET elements, else of every k-th
    after it                       ‖w' - w‖² = Σ over tensors (elements / elements copied) Σ over the copied (w' - w)²

    k   a prime that meets all columns of every matrix; where it begins changes from one recorded step to the next

So no more than BUDGET elements are held, and only while the optimizer steps; copies of a small model keep their memory
from one recorded step to the next, because asking for it anew takes as long as filling it. w is what the optimizer was
given: masters in float32 where the program keeps them there, else the weights as they are rounded. Sharded weights
count as in `norms`.

Whole float32 weights on the CPU are walked: all of them for the norm, and no more than WALKED elements for the update.
There memory is what costs, and it comes in lines of 64 bytes, so of more it is every k-th line that is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.metrics.primes import stride_over
from narrowgauge.observe.stats import host
from narrowgauge.session.tensors.memory import Array, Runs, runs
from narrowgauge.session.tensors.norms import Parts, Squares, Term, cut_by_fsdp, named, squares
from narrowgauge.session.tensors.shares import group_of

BUDGET = 1 << 24  # elements: 64 MiB in float32
WALKED = 1 << 17  # the same where a walk copies: half a MiB, which a cache has room for beside what is the program's
SMALL = 1 << 20  # 4 MiB
MOST = 16  # optimizers with small models

Array32 = npt.NDArray[np.float32]


class Plan(NamedTuple):
    """Where weights are that the walk copies, and where it puts the copies, one behind the other.

    Of each every `stride`-th line, which makes `held` elements of it. No weight is held by it.
    """

    whole: Runs
    budget: int
    copies: Array32
    starts: Array
    held: Array
    stride: int


class Room:
    """Memory for copies of weights, and the plans by which they are copied, for a few optimizers by their numbers."""

    def __init__(self) -> None:
        self._kept: dict[int, Array32] = {}
        self._plans: dict[int, Plan] = {}

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

    def plan(self, number: int, weights: list[Tensor], budget: int, line: int, few: int) -> Plan | None:
        """How weights are copied that are nothing but memory, else None; the last plan, if these are where they were.

        To make one takes longer than to copy a small model.
        """
        known = self._plans.get(number)
        whole = runs(weights, None if known is None else known.whole)
        if whole is None:
            return None
        if known is None or whole is not known.whole or budget != known.budget:
            stride = stride_over(_widths(whole.shapes), math.ceil(whole.elements / budget), line)
            lines = -(-whole.sizes // line)
            most = np.where(lines <= few, lines, -(-lines // stride)) * line  # of each, rounded up to whole lines
            copies = self.of(number, int(most.sum()))
            starts = copies.ctypes.data + 4 * (np.cumsum(most) - most)
            known = Plan(whole, budget, copies, starts, np.empty_like(most), stride)
            if self._kept.get(number) is copies:
                self._plans[number] = known
        return known


def _widths(shapes: Iterable[tuple[int, ...]]) -> set[int]:
    """Of the rows that tensors consist of, and those of their outermost dimension."""
    return {n for shape in shapes if len(shape) > 1 for n in (shape[-1], math.prod(shape[1:])) if n}


class Walked(NamedTuple):
    """Weights that the walk has copied, how, and from which line on; other ranks hold more of them if `partial`."""

    weights: list[Tensor]
    plan: Plan
    turn: int
    partial: bool

    def sum(self, walk: Callable[..., float], now: Runs, *more: Array) -> Squares:
        """What a walk says of the weights and the copies."""
        plan = self.plan
        total = walk(now.ats, plan.starts, now.sizes, plan.stride, self.turn, *more)
        square = torch.from_numpy(np.array(total))  # `torch.tensor` takes ten times as long
        return Squares(Term(square, None if self.partial else 1))


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

    def before(self, optimizer: Optimizer, *, in_parts: bool = False) -> None:
        """The optimizer is about to step; other ranks hold more of what it trains if `in_parts`."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        alone = host.ready() and not any(map(group_of, weights))  # else some count once for several ranks
        walk = host.kernel() if alone else None
        number, budget = id(optimizer), min(self._budget, WALKED)
        plan = None if walk is None else self._room.plan(number, weights, budget, walk.LINE, walk.FEW)
        if walk is not None and plan is not None:
            held = Walked(weights, plan, self._turn, in_parts or any(map(cut_by_fsdp, weights)))
            self._weights = held.sum(walk.copied, plan.whole, plan.held).and_also(self._weights)
            if plan.stride > 1:
                self.share = min(self.share, float(plan.held.sum()) / plan.whole.elements)
            self._walked[number] = held
        else:
            self._pass(optimizer, weights, in_parts)

    @torch.no_grad()
    def _pass(self, optimizer: Optimizer, weights: list[Tensor], in_parts: bool) -> None:
        """As `before`, by passes of torch's."""
        parts = Parts(weights, in_parts=in_parts)
        elements = sum(x.numel() for x in parts.here)
        total = parts.squares()
        if total is None:
            return
        self._weights = total.and_also(self._weights)
        stride = stride_over(_widths(x.shape for x in parts.here), math.ceil(elements / self._budget))
        views = [_every(x, stride, self._turn) for x in parts.here]
        self.share = min(self.share, sum(v.numel() for v in views) / elements)
        self._held[id(optimizer)] = weights, parts, stride, [v.clone() for v in views]

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

    def _look(self, number: int) -> None:
        walked, held = self._walked.pop(number, None), self._held.pop(number, None)
        walk = None if walked is None else host.kernel()
        if walked is not None and walk is not None:
            whole = walked.plan.whole
            now = runs(walked.weights, whole)  # a step may have put other memory in a weight's place
            if now is None or (now is not whole and now.shapes != whole.shapes):
                self._lost = True
            else:
                self._moved = walked.sum(walk.moved, now).and_also(self._moved)
        if held is not None:
            self._pass_again(*held)

    @torch.no_grad()
    def _pass_again(self, weights: list[Tensor], before: Parts, stride: int, copies: list[Tensor]) -> None:
        """As `_look`, by passes of torch's."""
        parts = Parts(weights, in_parts=before.in_parts)
        alike = [_kind(x) for x in parts.here] == [_kind(x) for x in before.here]
        if not alike or any(map(_freed, parts.here)):
            self._lost = True
            return
        views = [_every(x, stride, self._turn) for x in parts.here]
        torch._foreach_sub_(copies, views)
        factors = [x.numel() / v.numel() for x, v in zip(parts.here, views, strict=True)]
        moved = squares(copies, parts.copies, factors, parts.ranks)
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
