"""From tallies to packed moments, for many tensors at once.

    tally, tally, ...      ->  [S, width]    the parts of a site (runs of rows, microbatches) merged by law
    counted, counted, ...  ->                what the CPU counted is packed already; of several parts, but for columns

Rows give their histograms part by part, and those add up. A column's SQNR needs its sums over all parts, so these are
kept apart and become a histogram only when everything has been seen.

Legend: S = sites, H = head width, R = rows or columns of all of them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats.centering import Number
from narrowgauge.observe.stats.counting import count_sqnr, fold_exponents, fold_ranges
from narrowgauge.observe.stats.host import Array, Counted
from narrowgauge.observe.stats.merging import empty, merge
from narrowgauge.observe.stats.tally import Tally

PENDING = 256  # tallies held before they are folded: what many microbatches leave behind stays bounded
PARTS = 16  # vectors of a site held before they are merged, for the same reason


def head(values: dict[str, Number], device: torch.device) -> Tensor:
    """The head of a packed vector from named numbers; what is not named is neutral. [H] float64."""
    out = empty(device, width=MOMENTS.head_width)
    if device.type == "cpu":
        numbers = out.numpy()
        for name, value in values.items():
            numbers[MOMENTS.offsets[name]] = float(value)
        return out
    on_device = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if on_device:
        numbers_there = torch.stack([value.double() for value in on_device.values()])
        out.index_copy_(0, _places(tuple(on_device), device), numbers_there)
    for name, value in values.items():
        if not isinstance(value, Tensor):
            out[MOMENTS.offsets[name]].fill_(value)  # assigning the number instead would wait for the device
    return out


@cache
def _places(names: tuple[str, ...], device: torch.device) -> Tensor:
    return torch.tensor([MOMENTS.offsets[name] for name in names], device=device)


def stack_parts(vectors: Sequence[Sequence[Tensor | Array]]) -> Tensor:
    """The vectors of every site's parts, all of one device -> [S, ...], merged by law."""
    most = max(len(parts) for parts in vectors)
    if most == 1 and all(isinstance(part, np.ndarray) for (part,) in vectors):
        return torch.from_numpy(np.stack([part for (part,) in vectors]))
    sites = [[torch.as_tensor(part) for part in parts] for parts in vectors]
    if most == 1:
        return torch.stack([part for (part,) in sites])
    first = sites[0][0]
    filler = empty(first.device, width=first.shape[-1])
    padded = [torch.stack([*parts, *[filler] * (most - len(parts))]) for parts in sites]
    return merge(torch.stack(padded, 1))


def pack_looks(packer: Packer, sites: Sequence[str], packed: Tensor) -> None:
    """Hand over what kernels counted of many tensors, [L, width]: one row per look, a site's microbatches merged."""
    order = {site: i for i, site in enumerate(dict.fromkeys(sites))}
    if len(order) < len(sites):
        packed = merge(torch.cat((packed, empty(packed.device, 1)))[_looks_of(tuple(sites), packed.device)])
    packer.add_table(list(order), packed)


@lru_cache(8)
def _looks_of(sites: tuple[str, ...], device: torch.device) -> Tensor:
    """Rows of the looks of each site, [P, S]; where a site has fewer than P, the row behind the last."""
    looks: dict[str, list[int]] = {}
    for row, site in enumerate(sites):
        looks.setdefault(site, []).append(row)
    most = max(len(rows) for rows in looks.values())
    padded = [rows + [len(sites)] * (most - len(rows)) for rows in looks.values()]
    return torch.tensor(padded, device=device).t()


@dataclass
class Packer:
    """Gathers the tallies of a step on one device, and gives their packed moments at its end.

    Args:
        expected: how many sites there will be that are counted on the CPU, each once; more are taken as well.
    """

    expected: int = 0
    _pending: dict[str, list[Tally]] = field(default_factory=dict)
    _count: int = 0
    _folded: dict[str, list[Tensor]] = field(default_factory=dict)
    _tables: list[tuple[list[str], Tensor]] = field(default_factory=list)
    _columns: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _counted: dict[str, Counted] = field(default_factory=dict)  # of sites that nothing else is known of

    def __post_init__(self) -> None:
        self._table: Array = np.empty((self.expected, MOMENTS.width))  # what `room` gives, row by row
        self._table[:] = MOMENTS.neutral
        self._given: list[Array | None] = [None] * self.expected
        self._next = itertools.count()  # threads may ask at once

    def __bool__(self) -> bool:
        return bool(self._pending or self._folded or self._tables or self._counted)

    def room(self) -> Array:
        """A neutral vector [width] for what is counted next: side by side with the others it is packed already."""
        row = next(self._next)
        if row >= self.expected:
            return MOMENTS.empty()
        vector: Array = self._table[row]
        self._given[row] = vector
        return vector

    def add(self, site: str, parts: Sequence[Tally | Counted], amax_ratio: Tensor | None = None) -> None:
        """Take what was counted of one tensor, which may have been seen before (another microbatch)."""
        for part in parts:
            if amax_ratio is not None:
                part.note("amax_ratio", amax_ratio.detach())
            if isinstance(part, Counted):
                self.add_counted(site, part)
            else:
                self._pending.setdefault(site, []).append(part)
                self._count += 1
        if self._count >= PENDING:
            self._fold()

    def add_counted(self, site: str, part: Counted) -> None:
        """Take what was counted of one tensor on the CPU."""
        if site not in self._counted and site not in self._folded:
            self._counted[site] = part
            return
        first = self._counted.pop(site, None)
        self._hand_over(site, *(each for each in (first, part) if each is not None))

    def add_packed(self, site: str, vector: Tensor) -> None:
        """Take moments [width] that someone else packed."""
        vectors = self._folded.setdefault(site, [])
        vectors.append(vector.detach().double())
        if len(vectors) >= PARTS:
            vectors[:] = [merge(torch.stack(vectors))]

    def add_table(self, sites: list[str], packed: Tensor) -> None:
        """Take the moments [S, width] of many sites at once; only when nothing else comes are they left as they are."""
        self._tables.append((sites, packed))

    @property
    def counted(self) -> int:
        """How many sites were counted on the CPU, each once."""
        return len(self._counted)

    def pack(self) -> tuple[list[str], Tensor]:
        """The sites and their packed moments [S, width]; at least one site must have been added."""
        if not (self._pending or self._folded or self._tables):
            return list(self._counted), self._pack_counted()
        for site, part in self._counted.items():
            self._hand_over(site, part)
        self._counted = {}
        self._fold()
        if len(self._tables) == 1 and not self._folded:
            return self._tables[0]
        for owners, table in self._tables:
            for site, vector in zip(owners, table, strict=True):
                self.add_packed(site, vector)
        sites = list(self._folded)
        packed = stack_parts(list(self._folded.values()))
        if self._columns:
            index = {site: i for i, site in enumerate(sites)}
            lines = [(index[site], *sums) for (site, _), sums in self._columns.items()]
            packed[:, MOMENTS["col_sqnr"]] += _sqnr(lines, len(sites))
        return sites, packed

    def _pack_counted(self) -> Tensor:
        """The usual step on the CPU: every site was seen once, and nothing but counted."""
        vectors = [part.vector for part in self._counted.values()]
        if len(vectors) <= self.expected and all(map(operator.is_, vectors, self._given)):
            return torch.from_numpy(self._table[: len(vectors)])
        return torch.from_numpy(np.stack(vectors))

    def _hand_over(self, site: str, *parts: Counted) -> None:
        """Take what was counted like what others packed."""
        for part in parts:
            vector, columns = part.parts()
            self.add_packed(site, vector)
            self._add_columns(site, columns)

    def _fold(self) -> None:
        """Turn what is pending into one vector per site, without its columns, and add their sums to the rest."""
        if not self._pending:
            return
        sites = list(self._pending.values())
        device = sites[0][0].row_signal.device
        heads = stack_parts([[head(t.values, device) for t in parts] for parts in sites])
        exponents, ranges, zeros = (
            torch.stack([_added([getattr(t.sample, name) for t in parts]) for parts in sites])
            for name in ("exponents", "ranges", "zeros")
        )
        rows = _sqnr([(i, t.row_signal, t.row_error) for i, parts in enumerate(sites) for t in parts], len(sites))
        tail = (rows, torch.zeros_like(rows), fold_exponents(exponents, zeros), fold_ranges(ranges))
        packed = torch.cat((heads, *tail), -1)
        for i, (site, parts) in enumerate(self._pending.items()):
            self.add_packed(site, packed[i])
            for t in parts:
                self._add_columns(site, torch.stack((t.col_signal, t.col_error)))
        self._pending, self._count = {}, 0

    def _add_columns(self, site: str, columns: Tensor) -> None:
        """Add a part's column sums [2, K]; a part of another width has other columns."""
        key = (site, columns.shape[1])
        if key in self._columns:
            self._columns[key] = self._columns[key] + columns  # in inference mode they were made for good
        else:
            self._columns[key] = columns


def _added(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(0)


def _sqnr(lines: Sequence[tuple[int, Tensor, Tensor]], owners: int) -> Tensor:
    """SQNR histograms [owners, bins] of rows or columns given as (owner, signal, error)."""
    owner = torch.cat([torch.full_like(signal, i, dtype=torch.int64) for i, signal, _ in lines])
    signal = torch.cat([signal.double() for _, signal, _ in lines])
    error = torch.cat([error.double() for _, _, error in lines])
    return count_sqnr(signal, error, owner, owners)
