"""A linear layer whose weight is cut over ranks for good (tensor parallelism): each rank multiplies its part.

Along each dimension of the weight's mesh, w being cut or copied:

    w                  x                     y                 dx            dw        db
    Shard(0), N cut    Replicate             Shard(-1)         Partial       Shard(0)  Shard(0)        column-wise
    Shard(1), K cut    Shard(-1)             Partial           Shard(-1)     Shard(1)  Replicate       row-wise
    Replicate          Replicate             Replicate         Replicate     Replicate Replicate
    Replicate          Shard(d), rows cut    Shard(d)          Shard(d)      Partial   Partial

These are the placements that torch's own product has. An x that lies otherwise is brought there; sums (Partial) are
left to whoever reads them. Inside of it all is plain tensors: a part is quantized as a tensor of its own, by a scale of
its own where the recipe makes scales from the tensor, so nothing is asked of other ranks before the product.

A bias that is added to a Partial y is added by one rank, and gets its gradient on all of them.

Legend: N = output features, K = input features; a weight is w_NK.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.compute.nn.parallel.placements import is_distributed

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Everywhere = dict[str, list[bool]]  # of input, weight, grad_output: along which dimensions all ranks have the same


def product_in_parts(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Everywhere]:
    """`product` of this rank's parts of x [..., K], weight [N, K] and bias [N], as a DTensor [..., N]; what are copies.

    Raises what torch's product of DTensors raises where x is none, or lies on another mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, last = weight.device_mesh, x.dim() - 1  # type: ignore[attr-defined]
    if not is_distributed(x) or x.device_mesh != mesh:  # type: ignore[attr-defined]
        F.linear(x, weight, bias)  # raises the error that the user knows
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)  # implicit replication is on
    x_is, y_is, dx_is, dw_is, b_is, db_is = lists = [[] for _ in range(6)]  # type: ignore[var-annotated]
    adds_bias = True
    for i, (cut, x_now) in enumerate(zip(weight.placements, x.placements, strict=True)):  # type: ignore[attr-defined]
        if cut.is_replicate():
            by_rows = x_now.is_shard() and x_now.dim % x.dim() != last
            rows = Shard(x_now.dim % x.dim()) if by_rows else Replicate()
            summed = Partial() if by_rows else Replicate()
            placed: tuple[Any, ...] = (rows, rows, rows, summed, Replicate(), summed)
        elif cut.dim % 2 == 0:
            placed = (Replicate(), Shard(last), Partial(), Shard(0), Shard(0), Shard(0))
        else:
            placed = (Shard(last), Partial(), Shard(last), Shard(1), Replicate(), Replicate())
            adds_bias = adds_bias and mesh.get_local_rank(i) == 0
        for places, place in zip(lists, placed, strict=True):
            places.append(place)
    b = None
    if bias is not None:
        b = _Once.apply(_part(bias, b_is, db_is), adds_bias)  # type: ignore[no-untyped-call]
    y = product(_part(x, x_is, dx_is), _part(weight, list(weight.placements), dw_is), b)  # type: ignore[attr-defined]
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    whole = DTensor.from_local(y, mesh, y_is, run_check=False, shape=shape, stride=_strides(shape))
    everywhere = {
        "input": [place.is_replicate() for place in x_is],
        "weight": [place.is_replicate() for place in weight.placements],  # type: ignore[attr-defined]
        "grad_output": [not place.is_shard() for place in y_is],
    }
    return whole, everywhere


def _part(x: Any, placements: list[Any], grad_placements: list[Any]) -> Tensor:
    """This rank's part of a DTensor, plain, and there already; `grad_placements` say what its gradient will be."""
    if list(x.placements) != placements:
        x = x.redistribute(placements=placements)
    part: Tensor = x.to_local(grad_placements=grad_placements)
    if type(part) is Tensor or torch.compiler.is_compiling():
        return part
    arrived: Tensor = _Arrived.apply(part)  # type: ignore[no-untyped-call]
    return arrived


class _Arrived(torch.autograd.Function):
    """What a collective that still runs will give, once the device has waited for it."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        """A view of it."""
        plain: Tensor = x.trigger_wait() if hasattr(x, "trigger_wait") else x
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        """As it is."""
        return dx


class _Once(torch.autograd.Function):
    """A bias where it is to be added, zeros elsewhere; its gradient is everywhere the same."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, here: bool) -> Tensor:
        """[N]."""
        return bias.view_as(bias) if here else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, db: Tensor) -> tuple[Tensor, None]:
        """As it is."""
        return db, None


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a tensor without gaps."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
