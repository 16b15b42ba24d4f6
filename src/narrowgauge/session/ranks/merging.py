"""Many ranks' tables become one, on the device that gathered them.

    rows of all ranks [T, W]  --which rows belong to a site: [P, U]-->  parts [P, U, W]  --merge law-->  [U, W]

Ranks hold parts of a tensor (their share of the batch, a shard) or copies of it. Parts are merged by the law; of copies
one is taken, or a weight that eight ranks have would count its elements eight times:

    declared    DDP, FSDP2 and DTensors say who has the same values: the lowest of these ranks is taken
    alike       what nobody declared and may be copies all the same (alike.py): those with equal values

What was taken for copies travels to the host beside the result, a few numbers a rank, and is compared there.

Legend: T = rows of all ranks, P = most ranks that a site has, U = sites of all ranks, W = width, D = compared sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.metrics import MOMENTS
from narrowgauge.metrics.stages import Stages
from narrowgauge.observe.stats.guard import Marks
from narrowgauge.observe.stats.merging import empty, merge
from narrowgauge.observe.stats.transfer import Packed
from narrowgauge.session.ranks.alike import COMPARED, Alike, Owner, fed_alike
from narrowgauge.session.ranks.layout import BY, Layout, address, families

CHUNK = 256  # sites merged together: bounds the room for intermediate results


@dataclass(frozen=True)
class Union:
    """Who has which site: `places[u]` are the (rank, row) of site u, `copies[u]` and `meshes[u]` what layouts say."""

    sites: tuple[str, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    copies: tuple[tuple[int | None, ...], ...]
    meshes: tuple[tuple[int | None, ...], ...]

    @classmethod
    def of(cls, sites: Sequence[Sequence[str]], layouts: Sequence[Layout] = ()) -> Union:
        """The union of the ranks' sites, in the order in which the first of them has them; `layouts`, of operands."""
        places: dict[str, list[tuple[int, int]]] = {}
        said: dict[str, list[tuple[int | None, int | None]]] = {}
        for rank, names in enumerate(sites):
            firsts, meshes = (layouts[rank].copies, layouts[rank].meshes) if layouts else ((), ())
            for row, site in enumerate(names):
                places.setdefault(site, []).append((rank, row))
                said.setdefault(site, []).append((firsts[row] if firsts else None, meshes[row] if meshes else None))
        copies, meshes_of = (tuple(tuple(each[i] for each in one) for one in said.values()) for i in (0, 1))
        return cls(tuple(places), tuple(map(tuple, places.values())), copies, meshes_of)

    @cached_property
    def _counting(self) -> tuple[tuple[int, ...], ...]:
        """Which of a site's places count: of declared copies, the first that there is."""
        return tuple(
            tuple(i for i, first in enumerate(said) if first is None or first not in said[:i]) for said in self.copies
        )

    @cached_property
    def taken(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The places that count."""
        return tuple(tuple(places[i] for i in which) for places, which in zip(self.places, self._counting, strict=True))

    @cached_property
    def on_mesh(self) -> tuple[tuple[bool, ...], ...]:
        """Whether what counts is known to be on a mesh."""
        return tuple(tuple(mesh is not None for mesh in each) for each in self.meshes)

    @cached_property
    def owners(self) -> tuple[tuple[Owner, ...], ...]:
        """The ranks whose places count, and the meshes that they lie on."""
        return tuple(
            tuple((places[i][0], meshes[i]) for i in which)
            for places, meshes, which in zip(self.places, self.meshes, self._counting, strict=True)
        )

    @cached_property
    def ranks(self) -> npt.NDArray[np.int64]:
        """How many ranks have each site, [U]."""
        return np.array([len(places) for places in self.places], dtype=np.int64)

    @cached_property
    def compared(self) -> tuple[int, ...]:
        """The sites [D] of which several ranks hold what may be copies: those declared, and weights.

        Whether they are is asked once, not recipe by recipe.
        """
        return tuple(
            u
            for u, (site, places, said) in enumerate(zip(self.sites, self.places, self.copies, strict=True))
            if len(places) > 1 and (site.endswith(":weight") or any(first is not None for first in said))
            if BY not in site
        )

    @cached_property
    def by(self) -> dict[str, tuple[list[int], list[str]]]:
        """Which rows are by which recipe, and their sites; the run's own are by "", and come first."""
        found: dict[str, tuple[list[int], list[str]]] = {"": ([], [])}
        for u, name in enumerate(self.sites):
            by, _, site = name.rpartition(BY)
            rows, sites = found.setdefault(by, ([], []))
            rows.append(u)
            sites.append(site)
        return found


class Merger:
    """Merges tables of one combination of layouts, on one device; `stages` has the names of their sites."""

    def __init__(self, layouts: Sequence[Layout], device: torch.device, stages: Stages | None = None) -> None:
        names = (stages or Stages()).names
        self.layouts, self.families = tuple(layouts), families(layouts)
        self.operands = Union.of([_addresses(one, names(one.staged_operands)) for one in layouts], self.layouts)
        self.results = Union.of([names(one.staged_results) for one in layouts])
        offsets = np.cumsum([0] + [len(one.operands) for one in layouts])
        self._take = _indices(self.operands.taken, offsets, device)
        self._take_results = _indices(
            self.results.taken, np.cumsum([0] + [len(one.results) for one in layouts]), device
        )
        compared = tuple(self.operands.places[u] for u in self.operands.compared)
        self._compare = _indices(compared, offsets, device)
        self._rows_by = {
            by: torch.tensor(rows, dtype=torch.int64, device=device) for by, (rows, _) in self.operands.by.items()
        }
        fed = [fed_alike(one) for one in layouts]
        self._alike, self._alike_results = (
            Alike(union.sites, union.owners, fed, device) for union in (self.operands, self.results)
        )

    def __call__(self, rows: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The merged operands [U, W] and results [V, H], and what the host is to look at.

        Args:
            rows: [world, size], as gathered.

        Returns:
            None for what no rank has. The last is a vector: compared copies [P, D, 3], then every rank's scalars.
        """
        cuts = [one.cuts for one in self.layouts]
        operands = [rows[r, : cut[0]].view(-1, MOMENTS.width) for r, cut in enumerate(cuts)]
        results = [rows[r, cut[0] : cut[1]].view(-1, MOMENTS.head_width) for r, cut in enumerate(cuts)]
        scalars = [rows[r, cut[1] : cut[2]] for r, cut in enumerate(cuts)]
        together = _with_neutral(operands)
        slots = [MOMENTS.offsets[name] for name in COMPARED]
        seen = torch.stack([together[:, slot][self._compare] for slot in slots], -1).reshape(-1)
        merged = None
        if self.operands.sites:
            merged = _merged(together, self._take, self._alike)
        heads = None
        if self.results.sites:
            rows_of_results = _with_neutral(results)
            heads = _merged(rows_of_results, self._take_results, self._alike_results)
        return merged, heads, torch.cat([seen, *scalars])

    def packed(self, step: int, operands: Tensor | None, results: Tensor | None, marks: Marks) -> list[Packed]:
        """What `__call__` returned of a step, the run's own and by each further recipe."""
        found = []
        for by, (rows, sites) in self.operands.by.items():
            table = operands if sites else None
            if table is not None and len(self._rows_by) > 1:
                table = table[self._rows_by[by]]
            rest = ((), None) if by else (self.results.sites, results)
            columns = {"ranks": (self.operands.ranks[rows], self.results.ranks[: len(rest[0])])}
            if table is not None or rest[1] is not None:
                found.append(Packed(step, (sites, table), rest, [] if by else marks, columns, by))
        return found

    def split(self, vector: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.float64]]]:
        """What `__call__` returned last, on the host: compared copies [P, D, 3], and each rank's scalars [K, 1 + N]."""
        shape = (*self._compare.shape, len(COMPARED))
        cut = int(np.prod(shape))
        tables, rest = [], vector[cut:]
        for one in self.layouts:
            size = one.cuts[2] - one.cuts[1]
            tables.append(rest[:size].reshape(one.rows, 1 + len(one.scalars)))
            rest = rest[size:]
        return vector[:cut].reshape(shape), tables


def _addresses(one: Layout, sites: Sequence[str]) -> Sequence[str]:
    return [address(by, site) for by, site in zip(one.by, sites, strict=True)] if one.by else sites


def _indices(
    places: Sequence[Sequence[tuple[int, int]]], offsets: npt.NDArray[np.int64], device: torch.device
) -> Tensor:
    """Rows of each site among all rows, [P, U]; where a site has fewer than P, the neutral row behind the last."""
    most = max((len(each) for each in places), default=1)
    neutral = int(offsets[-1])
    rows = [[int(offsets[rank]) + row for rank, row in each] + [neutral] * (most - len(each)) for each in places]
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, most).t()


def _merged(rows: Tensor, take_PU: Tensor, copies: Alike) -> Tensor:
    """Sites [U, W] of their parts, some sites at a time."""
    cuts = range(0, take_PU.shape[1], CHUNK)
    return torch.cat([merge(copies.once(rows[take_PU[:, at : at + CHUNK]], at)) for at in cuts])


def _with_neutral(tables: Sequence[Tensor]) -> Tensor:
    return torch.cat([*tables, empty(tables[0].device, 1, width=tables[0].shape[1])])
