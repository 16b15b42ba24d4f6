"""Norms over many tensors at once, of what this process holds of them, without a collective.

total = Σ ‖x_here‖² / copies(x)         norms in float32 (float64: in it), squares in float64, on the first's device
norm  = sqrt(total)                     if all of every x is here
else  `total` is this rank's part: the ranks' parts together are the square of the norm

copies   how many ranks hold the same part of x: the mesh's dimensions that replicate it (`sharded.py`), times the ranks
         of the largest mesh for each one of x's own; a plain tensor next to sharded ones is on a mesh of one rank, or,
         where Megatron-Core cut it, on that of its group (`shares.py`)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.session.tensors.sharded import is_distributed, local_of, mesh_size
from narrowgauge.session.tensors.shares import group_of, is_experts

PIECE = 1 << 16  # elements


class Squares(NamedTuple):
    """A sum of squares.

    Args:
        total: of what is here, [] float64.
        partial: whether other ranks hold more.
        ranks: over how many ranks their totals are to be added up for the whole; 1 if all is here, or, of what is
            partial, if nobody says.
    """

    total: Tensor
    partial: bool
    ranks: int = 1

    def and_also(self, other: Squares | None) -> Squares:
        """Of both; over the more ranks of the two, of which each has the other's."""
        if other is None:
            return self
        ranks = max(self.ranks, other.ranks)
        total = self._over(ranks) + other._over(ranks).to(self.total.device)
        return Squares(total, self.partial or other.partial, ranks)

    def _over(self, ranks: int) -> Tensor:
        alone = self.partial and self.ranks == 1  # nobody else has this, on however many ranks the rest lies
        return self.total if alone or self.ranks == ranks else self.total * (self.ranks / ranks)


class Parts:
    """The parts of some parameters, or their gradients, that are here.

    Args:
        tensors: what to look at; what is sparse, or only a summand of something, is left out.
        owners: the parameters that they belong to, if they are not those themselves.
        in_parts: whether other ranks hold more of them, though they do not say so.
    """

    def __init__(
        self, tensors: Iterable[Tensor], owners: Iterable[Tensor] | None = None, *, in_parts: bool = False
    ) -> None:
        tensors = list(tensors)
        owned = list(zip(tensors, tensors if owners is None else owners, strict=True))
        self.here: list[Tensor] = []
        self.copies: list[int] = []
        self.in_parts = self.partial = in_parts
        sizes = [mesh_size(x) if is_distributed(x) else len(group_of(owner)) or 1 for x, owner in owned]
        self.ranks = max(sizes, default=1)
        for (x, owner), size in zip(owned, sizes, strict=True):
            alone = in_parts or is_experts(owner) or cut_by_fsdp(owner)
            mesh = self.ranks if alone else size
            held = local_of(x)
            if held.tensor is None or held.tensor.layout is not torch.strided or not held.tensor.numel():
                continue
            self.here.append(_real(held.tensor))
            self.copies.append(held.copies * (self.ranks // mesh))
            self.partial |= held.copies < mesh or cut_by_fsdp(owner)
        if not self.partial:
            self.copies, self.ranks = [1] * len(self.here), 1

    def squares(self, weights: Iterable[float] | None = None) -> Squares | None:
        """Their sum of squares, each weighed by its weight (1 if none are given); None if there is nothing here."""
        return squares(self.here, self.copies, self.partial, weights, self.ranks)


def cut_by_fsdp(x: Tensor) -> bool:
    """Whether FSDP1 has sharded this parameter; it marks what it did."""
    return bool(getattr(x, "_fsdp_flattened", False))


def squares(
    tensors: list[Tensor],
    copies: list[int],
    partial: bool,
    weights: Iterable[float] | None = None,
    ranks: int = 1,
) -> Squares | None:
    """Σ weight ‖x‖² / copies over plain tensors."""
    if not tensors:
        return None
    home = tensors[0].device
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    pieces: list[Tensor] = []
    factors: list[float] = []
    for x, w, c in zip(tensors, weights or [1.0] * len(tensors), copies, strict=True):
        here = _pieces(x)
        pieces += here
        factors += [math.sqrt(w / c)] * len(here)
    norms = torch._foreach_norm(pieces, 2, dtype)
    if any(factor != 1.0 for factor in factors):
        norms = torch._foreach_mul(norms, factors)
    return Squares(torch.stack([norm.to(home) for norm in norms]).double().square().sum(), partial, ranks)


def _real(x: Tensor) -> Tensor:
    """x; of complex numbers both parts, side by side."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _pieces(x: Tensor) -> list[Tensor]:
    """x, on a CPU in runs of PIECE: there torch adds up one by one, and a long sum in float32 loses digits."""
    if x.device.type != "cpu" or x.numel() <= PIECE or not torch.ops.aten.is_non_overlapping_and_dense(x):
        return [x]
    run = x.as_strided((x.numel(),), (1,), x.storage_offset())
    return [run[start : start + PIECE] for start in range(0, x.numel(), PIECE)]


def of_norm(norm: Tensor) -> Squares:
    """The square of a norm that the program took itself; of a DTensor's, which is only reduced when used, our part."""
    norm = norm.detach()
    if not is_distributed(norm):
        return Squares(norm.double().square(), False)
    mesh, placements = norm.device_mesh, norm.placements  # type: ignore[attr-defined]
    copies = math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate())
    partial = copies < mesh.size()
    here: Tensor = norm.to_local()  # type: ignore[attr-defined]
    return Squares(here.double().square() / (copies if partial else 1), partial, mesh.size() if partial else 1)


def named(what: str, found: Squares) -> dict[str, Tensor]:
    """`<what>_norm`, or `<what>_square_local` where other ranks hold more of it."""
    return {f"{what}_square_local": found.total} if found.partial else {f"{what}_norm": found.total.sqrt()}


def of_clips(norms: list[Tensor]) -> dict[str, Tensor]:
    """The same of the gradients, from norms that the program took itself, each over others of them."""
    if len(norms) == 1 and type(norms[0]) is Tensor:
        return {"grad_norm": norms[0]}
    found: Squares | None = None
    for norm in norms:
        found = of_norm(norm).and_also(found)
    return {} if found is None else named("grad", found)
