"""`torch.einsum` of two tensors as a matrix product.

    letters of x and w, not of the result    contracted: together they are K
    letters of both and of the result        batched: the experts
    the rest                                 M of x, N of w

So "btd,hkd->bthk" is x [B·T, D] times w [H·K, D]. Equations with an ellipsis, with a letter twice in one tensor, or
with one that is summed in one tensor alone are no such product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from narrowgauge.session.sites.part import Turn


class Turns(NamedTuple):
    """How the three tensors of an equation lie as matrices; `w_rows` gives [E, N, K] if experts are batched."""

    x_rows: Turn
    w_rows: Turn
    dy_rows: Turn


def turns_of(equation: str, *, weight: int) -> Turns | None:
    """Read an equation whose operand `weight`, 0 or 1, is the weight; None if it is no matrix product."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if "." in equation or len(operands) != 2:
        return None
    x, w = operands[1 - weight], operands[weight]
    if not arrow:
        out = "".join(sorted(c for c in {*left} - {","} if left.count(c) == 1))
    if any(len({*letters}) < len(letters) for letters in (x, w, out)):
        return None
    both = [c for c in w if c in x]
    summed, batch = [c for c in both if c not in out], [c for c in both if c in out]
    free_x, free_w = ([c for c in own if c not in both] for own in (x, w))
    if not summed or not {*free_x, *free_w} <= {*out}:
        return None
    return Turns(
        partial(_matrix, order=_order(x, [*batch, *free_x, *summed]), last=len(summed), experts=0),
        partial(_matrix, order=_order(w, [*batch, *free_w, *summed]), last=len(summed), experts=len(batch)),
        partial(_matrix, order=_order(out, [*batch, *free_x, *free_w]), last=len(free_w), experts=0),
    )


def _order(letters: str, wanted: Sequence[str]) -> list[int]:
    return [letters.index(c) for c in wanted]


def _matrix(t: Tensor, order: list[int], last: int, experts: int) -> Tensor:
    t = t.permute(order)
    columns = t.shape[t.dim() - last :].numel()
    if experts:
        return t.reshape(t.shape[:experts].numel(), -1, columns)
    return t.reshape(-1, columns)
