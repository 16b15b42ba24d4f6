"""From tallies to packed moments, for many tensors at once.

    tally, tally, ...  ->  [S, width]        the parts of a site (runs of rows, microbatches) merged by law

Rows give their histograms part by part, and those add up. A column's SQNR needs its sums over all parts, so these are
kept apart and become a histogram only when everything has been seen.

Legend: S = sites, H = head width, R = rows or columns of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats.centering import Number
from narrowgauge.observe.stats.counting import count_sqnr, fold_exponents, fold_ranges
from narrowgauge.observe.stats.merging import empty, merge
from narrowgauge.observe.stats.tally import Tally

PENDING = 256  # tallies held before they are folded: what many microbatches leave behind stays bounded


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


def stack_parts(sites: Sequence[Sequence[Tensor]]) -> Tensor:
    """The vectors of every site's parts -> [S, ...], merged by law."""
    most = max(len(parts) for parts in sites)
    if most == 1:
        return torch.stack([parts[0] for parts in sites])
    first = sites[0][0]
    filler = empty(first.device, width=first.shape[-1])
    padded = [torch.stack([*parts, *[filler] * (most - len(parts))]) for parts in sites]
    return merge(torch.stack(padded, 1))


@dataclass
class Packer:
    """Gathers the tallies of a step on one device, and gives their packed moments at its end."""

    _pending: dict[str, list[Tally]] = field(default_factory=dict)
    _count: int = 0
    _folded: dict[str, list[Tensor]] = field(default_factory=dict)
    _columns: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._pending or self._folded)

    def add(self, site: str, tallies: Sequence[Tally]) -> None:
        """Take the tallies of one tensor, which may have been seen before (another microbatch)."""
        self._pending.setdefault(site, []).extend(tallies)
        self._count += len(tallies)
        if self._count >= PENDING:
            self._fold()

    def add_packed(self, site: str, vector: Tensor) -> None:
        """Take moments [width] that someone else packed."""
        self._folded.setdefault(site, []).append(vector.detach().double())

    def pack(self) -> tuple[list[str], Tensor]:
        """The sites and their packed moments [S, width]; at least one site must have been added."""
        self._fold()
        sites = list(self._folded)
        packed = stack_parts(list(self._folded.values()))
        if self._columns:
            index = {site: i for i, site in enumerate(sites)}
            lines = [(index[site], *sums) for (site, _), sums in self._columns.items()]
            packed[:, MOMENTS["col_sqnr"]] += _sqnr(lines, len(sites))
        return sites, packed

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
            self._folded.setdefault(site, []).append(packed[i])
            for t in parts:
                self._add_columns((site, t.col_signal.numel()), t)
        self._pending, self._count = {}, 0

    def _add_columns(self, key: tuple[str, int], t: Tally) -> None:
        """Add a part's column sums; a part of another width has other columns."""
        signal, error = self._columns.get(key, (0.0, 0.0))
        self._columns[key] = (t.col_signal + signal, t.col_error + error)


def _added(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(0)


def _sqnr(lines: Sequence[tuple[int, Tensor, Tensor]], owners: int) -> Tensor:
    """SQNR histograms [owners, bins] of rows or columns given as (owner, signal, error)."""
    owner = torch.cat([torch.full_like(signal, i, dtype=torch.int64) for i, signal, _ in lines])
    signal = torch.cat([signal.double() for _, signal, _ in lines])
    error = torch.cat([error.double() for _, _, error in lines])
    return count_sqnr(signal, error, owner, owners)
