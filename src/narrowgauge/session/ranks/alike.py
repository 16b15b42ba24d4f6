"""Copies that nobody declared, found by their values: equal counts, extremes and squares, where they may be copies.

    weights           of ranks that no mesh unites, or that different ones do: a mesh for each replica of the model
    anything else     of ranks that are fed the same: those that hold the same of another activation, as its DTensor
                      says. So the plain tensors of a layer that tensor parallelism leaves whole count once

Of zeros, or of any constant, nobody can tell parts from copies by their values. They count once where they may be
copies: of all that is merged only `numel` depends on it, and copies are what undeclared tensors mostly are. That they
were equal holds no rank to stay so.

Legend: P = most parts of a site, U = sites, W = width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats.merging import empty
from narrowgauge.session.ranks.layout import Layout

COMPARED = ("numel", "amax", "m2")  # what copies agree in
ALIKE = 1e-9  # relative: sums of the same numbers, added up by a GPU in another order

Owner = tuple[int, int | None]  # a rank that has a part, and the lowest rank of the mesh that it lies on


class Alike:
    """Which parts of each site may be copies of each other.

    Args:
        sites: in their order.
        owners: of each site, whose parts count.
        fed: of each rank, the lowest of those that are fed the same; None if nobody is known to be.
        device: where the tables are.
    """

    def __init__(
        self, sites: Sequence[str], owners: Sequence[Sequence[Owner]], fed: Sequence[int | None], device: torch.device
    ) -> None:
        weights = [site.endswith(":weight") for site in sites]
        known = [
            [mesh if weight else fed[rank] for rank, mesh in each] for each, weight in zip(owners, weights, strict=True)
        ]
        # What nothing is known of has a number that nothing else has.
        numbers = [[-1 - i if at is None else at for i, at in enumerate(each)] for each in known]
        most = max(map(len, numbers), default=1)
        doubtful = [
            len(set(each)) > 1 if weight else len(set(each)) < len(each)
            for each, weight in zip(numbers, weights, strict=True)
        ]
        padded = [each + [-1 - i for i in range(len(each), most)] for each in numbers]
        self._any = any(doubtful)
        self._doubtful_U = torch.tensor(doubtful, dtype=torch.bool, device=device)
        self._apart_U = torch.tensor(weights, dtype=torch.bool, device=device)
        self._numbers_PU = torch.tensor(padded, dtype=torch.int64, device=device).reshape(-1, most).t()

    def once(self, parts_PUW: Tensor, begin: int) -> Tensor:
        """The parts of the sites from `begin` on, without what an earlier one is a copy of."""
        if not self._any:
            return parts_PUW
        here = slice(begin, begin + parts_PUW.shape[1])
        numbers_PU = self._numbers_PU[:, here]
        numel, amax, m2 = (parts_PUW[..., MOMENTS.offsets[name]] for name in COMPARED)
        near_PPU = (m2[:, None] - m2).abs() <= ALIKE * m2
        may_PPU = (numbers_PU[:, None] != numbers_PU) == self._apart_U[here]
        alike_PPU = may_PPU & (numel[:, None] == numel) & (amax[:, None] == amax) & near_PPU
        order = torch.arange(len(numel), device=numel.device)
        earlier_PP1 = (order[:, None] < order)[..., None]
        seen_PU = (alike_PPU & earlier_PP1).any(0) & self._doubtful_U[here]
        neutral = empty(parts_PUW.device, 1, 1, width=parts_PUW.shape[-1])
        return torch.where(seen_PU[..., None], neutral, parts_PUW)


def fed_alike(layout: Layout) -> int | None:
    """The lowest of the ranks that are fed the same as this one, as its activations say; None if none or several do."""
    said = zip(layout.operands, layout.copies, strict=bool(layout.copies))
    found = {first for site, first in said if first is not None and not site.endswith(":weight")}
    return found.pop() if len(found) == 1 else None
