"""How far a step moves the weights, in recorded steps alone: ‖w‖ and ‖w' - w‖ / ‖w‖ over everything that is trained.

    before the optimizer's step    ‖w‖, and a copy of w: of all of it up to BUDGET elements, else of every k-th
    after it                       ‖w' - w‖² = Σ over tensors (elements / elements copied) Σ over the copied (w' - w)²

    k   a prime that meets all columns of every matrix; where it begins changes from one recorded step to the next

So no more than BUDGET elements are held, and only while the optimizer steps. w is what the optimizer was given: masters
in float32 where the program keeps them there, else the weights as they are rounded. Sharded weights count as in
`norms`.

Weights that are nothing but memory go by their addresses (`rooms`): on a CPU they are walked, all of them for the norm
and fewer elements for the update. There memory is what costs, and it comes in lines of 64 bytes, so of more it is every
k-th line that is copied. On a GPU one kernel has all of them, because to launch one for each takes the host longer than
reading them takes the GPU. All others go by passes of torch's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.metrics.primes import stride_over
from narrowgauge.observe.stats import host
from narrowgauge.session.tensors.memory import runs
from narrowgauge.session.tensors.norms import (
    Parts,
    Squares,
    Term,
    as_tensor,
    named,
    some_cut_by_fsdp,
    squares,
)
from narrowgauge.session.tensors.rooms import Launched, Room, Walked, widths
from narrowgauge.session.tensors.shares import some_in_groups

BUDGET = 1 << 24  # elements: 64 MiB in float32
SCALARS = ("param_norm", "update_ratio", "param_square_local", "update_square_local")  # all that it may tell


class Held(NamedTuple):
    """Weights that were copied by a plan, and the copies, if they are not the plan's own.

    Other ranks hold more of them if `partial`.
    """

    weights: list[Tensor]
    plan: Walked | Launched
    copies: Any
    partial: bool

    def squares(self, total: Tensor | float) -> Squares:
        """Of all of them."""
        return Squares(Term(total, None if self.partial else 1))


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
        self._copied: dict[int, Held] = {}
        self._weights: Squares | None = None
        self._moved: Squares | None = None
        self._early: list[int] = []
        self._seen: set[int] = set()  # the ids of all weights that count so far
        self._lost = False  # some weights could not be looked at when they had moved
        self.share = 1.0  # of the elements that were copied

    def begin_anew(self) -> None:
        """No step came of what was looked at."""
        self._held, self._copied, self._weights, self._moved = {}, {}, None, None
        self._seen, self._lost = set(), False

    def before(self, optimizer: Optimizer, *, in_parts: bool = False) -> None:
        """The optimizer is about to step; other ranks hold more of what it trains if `in_parts`.

        Of weights that another optimizer has stepped before, in the same step, the first copy is gone: they count once,
        and nobody can tell how far both moved them together.
        """
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        number = id(optimizer)
        if not self._seen.isdisjoint(map(id, weights)):
            weights, self._lost = [p for p in weights if id(p) not in self._seen], True
            if not weights:
                return
        self._seen.update(map(id, weights))
        # Where some are in groups, these count once for several ranks.
        plan = None if some_in_groups(weights) else self._room.plan(number, weights, self._budget)
        if plan is None:
            self._pass(optimizer, weights, in_parts)
            return
        total, copies = plan.copy(self._turn)
        held = self._copied[number] = Held(weights, plan, copies, in_parts or some_cut_by_fsdp(weights))
        self._weights = held.squares(total).and_also(self._weights)
        self.share = min(self.share, plan.share)

    @torch.no_grad()
    def _pass(self, optimizer: Optimizer, weights: list[Tensor], in_parts: bool) -> None:
        """As `before`, by passes of torch's."""
        parts = Parts(weights, in_parts=in_parts)
        elements = sum(x.numel() for x in parts.here)
        total = parts.squares()
        if total is None:
            return
        self._weights = total.and_also(self._weights)
        stride = stride_over(widths(x.shape for x in parts.here), math.ceil(elements / self._budget))
        views = [_every(x, stride, self._turn) for x in parts.here]
        self.share = min(self.share, sum(v.numel() for v in views) / elements)
        copies = [v.float() if v.itemsize < 4 else v.clone() for v in views]  # a difference is not rounded to 16 bits
        self._held[id(optimizer)] = weights, parts, stride, copies

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
        copied, held = self._copied.pop(number, None), self._held.pop(number, None)
        if copied is not None:
            plan = copied.plan
            now = runs(copied.weights, plan.whole)  # a step may have put other memory in a weight's place
            if now is None or (now is not plan.whole and now.kinds != plan.whole.kinds):
                self._lost = True
            else:
                self._moved = copied.squares(plan.moved(now, self._turn, copied.copies)).and_also(self._moved)
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

    def scalars(self) -> dict[str, Tensor | float]:
        """`param_norm` and `update_ratio`; or, of sharded weights, this rank's part of the squares of both norms."""
        weights, moved = self._weights, self._moved
        if weights is None:
            return {}
        found = named("param", weights)
        if moved is None or self._lost:
            return found
        if moved.partial:
            return found | named("update", moved)
        return found | {"update_ratio": _ratio(moved.total, weights.total)}


def _ratio(moved: Tensor | float, weights: Tensor | float) -> Tensor | float:
    if isinstance(moved, Tensor) or isinstance(weights, Tensor):
        weights = as_tensor(weights)
        return (as_tensor(moved).to(weights.device) / weights).sqrt()
    return math.sqrt(moved / weights) if weights else moved * math.inf


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
