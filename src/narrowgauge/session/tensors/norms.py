"""Norms over many tensors at once, of what this process holds of them, without a collective.

total = Σ ‖x_here‖² / copies(x)         norms in float32 (float64: in it), squares in float64, on the first's device;
                                        on a CPU in float64 as well where float32 has no such squares
norm  = sqrt(total)                     if all of every x is here
else  `total` is this rank's part: the ranks' parts together are the square of the norm

copies   how many ranks hold the same part of x: the mesh's dimensions that replicate it (`sharded.py`), times the ranks
         of the largest mesh for each one of x's own; a plain tensor next to sharded ones is on a mesh of one rank, or,
         where Megatron-Core or FSDP1 cut it, on that of its group (`shares.py`)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.session.tensors.sharded import is_distributed, local_of, mesh_size
from narrowgauge.session.tensors.shares import (
    copies_in_group,
    counts_elsewhere,
    group_of,
    is_experts,
    laid_flat,
    may_tie_stages,
)

FSDP = "torch.distributed.fsdp"  # where parameters are marked
PIECE = 1 << 16  # elements
SURE = 1e-20  # a sum of squares of which even 10^12 elements are normal numbers of float32


class Term(NamedTuple):
    """A sum of squares of what is here, [] float64.

    Args:
        total: a number where the walk on the CPU found it: to make a tensor of it takes longer than to square a layer.
        ranks: over how many ranks such sums are to be added up for the whole; 1: all of it is here, and on every other
            rank; None: other ranks have more, and nobody says how many.
    """

    total: Tensor | float
    ranks: int | None = 1


class Squares:
    """The sum of several."""

    def __init__(self, *terms: Term) -> None:
        self._terms = terms

    def and_also(self, other: Squares | None) -> Squares:
        """Of both."""
        return self if other is None else Squares(*self._terms, *other._terms)

    @classmethod
    def of_all(cls, parts: Sequence[Squares]) -> Squares | None:
        """Of all of these; None of none."""
        return cls(*(term for part in parts for term in part._terms)) if parts else None

    def over(self, square: Tensor) -> Squares:
        """Of what all of it was, before it was multiplied by the root of `square`."""
        return Squares(
            *(
                Term(each / (square.to(each.device) if isinstance(each, Tensor) else square), ranks)
                for each, ranks in self._terms
            )
        )

    @property
    def partial(self) -> bool:
        """Whether other ranks hold more."""
        return any(term.ranks != 1 for term in self._terms)

    @property
    def ranks(self) -> int:
        """Over how many ranks totals are to be added up for the whole; 1 also if nobody says."""
        return max(term.ranks or 1 for term in self._terms)

    @property
    def total(self) -> Tensor | float:
        """Of what is here; what several of those `ranks` ranks have alike counts on each of them as much less."""
        ranks = self.ranks
        here = [t.total if t.ranks in (None, ranks) else t.total * (t.ranks / ranks) for t in self._terms]
        if len(here) == 1:
            return here[0]
        home = next((each.device for each in here if isinstance(each, Tensor)), torch.device("cpu"))
        return torch.stack([as_tensor(each).to(home) for each in here]).sum()


def as_tensor(total: Tensor | float) -> Tensor:
    """A sum of squares as a tensor, [] float64, whatever the program's default dtype and device are."""
    return total if isinstance(total, Tensor) else torch.tensor(total, dtype=torch.float64, device="cpu")


class Parts:
    """The parts of some parameters, or their gradients, that are here.

    Args:
        tensors: what to look at; what is sparse, only a summand of something, or another stage's is left out.
        owners: the parameters that they belong to, if they are not those themselves.
        in_parts: whether other ranks hold more of them, though they do not say so.
    """

    def __init__(
        self, tensors: Iterable[Tensor], owners: Iterable[Tensor] | None = None, *, in_parts: bool = False
    ) -> None:
        tensors = list(tensors)
        owned = list(zip(tensors, tensors if owners is None else owners, strict=True))
        if may_tie_stages():
            owned = [(x, owner) for x, owner in owned if not counts_elsewhere(owner)]
        self.here: list[Tensor] = []
        self.copies: list[int] = []
        self.in_parts = self.partial = in_parts
        self.summands = 0  # how many are left out because every rank has only a summand
        self.sparse = 0  # and how many because they are
        spread = [self._spread(x, owner) for x, owner in owned]
        ranks = max((size for size, _ in spread), default=1)
        for (x, owner), (size, copies) in zip(owned, spread, strict=True):
            held = local_of(x)
            self.summands += held.tensor is None
            if held.tensor is None or held.tensor.layout is not torch.strided or not held.tensor.numel():
                self.sparse += held.tensor is not None and held.tensor.layout is not torch.strided
                continue
            alone = cut_by_fsdp(owner) or (in_parts and is_experts(owner))  # whatever the others lie on
            copies *= held.copies
            self.here.append(_real(held.tensor))
            self.copies.append(1 if alone else copies * (ranks // size))
            self.partial |= alone or copies < size
        self.ranks = (ranks if ranks > 1 else None) if self.partial else 1
        if not self.partial:
            self.copies = [1] * len(self.here)

    def _spread(self, x: Tensor, owner: Tensor) -> tuple[int, int]:
        """How many ranks' parts make the whole of x, and how many of them have the same, where x does not say so."""
        if is_distributed(x):
            return mesh_size(x), 1
        group = [] if self.in_parts and is_experts(owner) else group_of(owner)
        return (len(group), copies_in_group(owner)) if group else (1, 1)

    def squares(self, weights: Iterable[float] | None = None) -> Squares | None:
        """Their sum of squares, each weighed by its weight (1 if none are given); None if there is nothing here."""
        return squares(self.here, self.copies, weights, self.ranks)


def cut_by_fsdp(x: Tensor) -> bool:
    """Whether FSDP1 has sharded this parameter, which it marks, and nobody says over which ranks."""
    return bool(getattr(x, "_fsdp_flattened", False)) and laid_flat(x) is None


def some_cut_by_fsdp(tensors: Iterable[Tensor]) -> bool:
    """Whether it has sharded any of them."""
    return FSDP in sys.modules and any(map(cut_by_fsdp, tensors))


def squares(
    tensors: list[Tensor],
    copies: list[int],
    weights: Iterable[float] | None = None,
    ranks: int | None = 1,
) -> Squares | None:
    """Σ weight ‖x‖² / copies over plain tensors; `ranks` as of a `Term`."""
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
    total = _of_pieces(pieces, factors, dtype, home)
    if dtype == torch.float32 and all(x.is_cpu for x in tensors) and not _is_sure(total, pieces):
        total = _of_pieces(pieces, factors, torch.float64, home)
    return Squares(Term(total, ranks))


def _of_pieces(pieces: list[Tensor], factors: list[float], dtype: torch.dtype, home: torch.device) -> Tensor:
    norms = torch._foreach_norm(pieces, 2, dtype)
    if any(factor != 1.0 for factor in factors):
        norms = torch._foreach_mul(norms, factors)
    return torch.stack([norm.to(home) for norm in norms]).double().square().sum()


def _is_sure(total: Tensor, pieces: list[Tensor]) -> bool:
    """Whether float32 had room for what makes up a sum of squares: it has none for those of 1e-23, nor of 1e20.

    Asked of CPUs alone, where nobody waits for the answer; to take all in float64 at once is twenty times as slow.
    """
    if type(total) is not Tensor or SURE <= float(total) < math.inf:
        return True
    largest = float(torch.stack(torch._foreach_norm(pieces, math.inf, torch.float32)).amax())
    return not 0.0 < largest < math.inf


def _real(x: Tensor) -> Tensor:
    """x; of complex numbers both parts, side by side."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _pieces(x: Tensor) -> list[Tensor]:
    """x, on a CPU in runs of PIECE: there torch adds up one by one, and a long sum in float32 loses digits."""
    if x.device.type != "cpu" or x.numel() <= PIECE or not torch.ops.aten.is_non_overlapping_and_dense(x):
        return [x]
    run = x.as_strided((x.numel(),), (1,), x.storage_offset())
    return [run[start : start + PIECE] for start in range(0, x.numel(), PIECE)]


def of_norm(norm: Tensor | float) -> Squares:
    """The square of a norm that the program took itself; of a DTensor's, which is only reduced when used, our part."""
    norm = norm.detach() if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float64, device="cpu")
    if not is_distributed(norm):
        return Squares(Term(norm.double().square()))
    mesh, placements = norm.device_mesh, norm.placements  # type: ignore[attr-defined]
    copies = math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate())
    here: Tensor = norm.to_local()  # type: ignore[attr-defined]
    square = here.double().square()
    return Squares(Term(square / copies, mesh.size()) if copies < mesh.size() else Term(square))


def named(what: str, found: Squares) -> dict[str, Tensor | float]:
    """`<what>_norm`, or `<what>_square_local` where other ranks hold more of it."""
    total = found.total
    if found.partial:
        return {f"{what}_square_local": total}
    return {f"{what}_norm": total.sqrt() if isinstance(total, Tensor) else math.sqrt(total)}


def of_clips(norms: list[Tensor | float], found: Squares | None = None) -> Mapping[str, Tensor | float]:
    """The same of the gradients, from norms that the program took itself, each over others of them, and `found`."""
    if len(norms) == 1 and type(norms[0]) in (float, Tensor) and found is None:
        return {"grad_norm": norms[0]}
    for norm in norms:
        found = of_norm(norm).and_also(found)
    return {} if found is None else named("grad", found)
