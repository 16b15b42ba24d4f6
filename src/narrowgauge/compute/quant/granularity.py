"""Granularity: how many elements of a matrix share one scale. A granule is such a set of elements.

    PerTensor      one granule                       scale []
    PerRow         row i                             scale [M, 1]
    PerColumn      column j                          scale [1, K]
    Block(r, c)    rows i·r..i·r+r-1, likewise c     scale [ceil(M / r), ceil(K / c)]

    amax_g = max |x_ij| over the granule g           (NaN if the granule holds a NaN, Inf if it holds an Inf)

Blocks at the right and bottom edges may be ragged: they cover what is left. Nothing is padded or copied for
that: the whole blocks are one strided view, the rest is another.

Legend: M = rows (tokens or output features), K = columns (the contracted dimension).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from narrowgauge.errors import ShapeError

Shape2d: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole matrix."""

    def scale_shape(self, shape2d: Shape2d) -> tuple[int, ...]:
        """Return the shape of the scale of a matrix: []."""
        return ()

    def amax(self, x_MK: Tensor) -> Tensor:
        """Return max |x| as a float32 scalar; 0 for an empty matrix."""
        require_matrix(x_MK)
        return _empty_amax(self, x_MK) if x_MK.numel() == 0 else _amax(x_MK)

    def expand(self, scale: Tensor, shape2d: Shape2d) -> Tensor:
        """Return the scale of every element, [M, K], without copying."""
        return scale.expand(shape2d)

    def multiply(self, x_MK: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Write x · scale into `out`, which may be x itself, and return it."""
        return torch.mul(x_MK, scale, out=out)

    def transposed(self) -> PerTensor:
        """Return the granularity of the transpose."""
        return self


@dataclass(frozen=True)
class PerRow:
    """One scale for each row: the contraction runs along it."""

    def scale_shape(self, shape2d: Shape2d) -> tuple[int, ...]:
        """Return the shape of the scale of a matrix: [M, 1]."""
        return (shape2d[0], 1)

    def amax(self, x_MK: Tensor) -> Tensor:
        """Return max |x| of every row, float32 [M, 1]; 0 for an empty row."""
        require_matrix(x_MK)
        return _empty_amax(self, x_MK) if x_MK.numel() == 0 else _amax(x_MK, dim=1).unsqueeze(1)

    def expand(self, scale: Tensor, shape2d: Shape2d) -> Tensor:
        """Return the scale of every element, [M, K], without copying."""
        return scale.expand(shape2d)

    def multiply(self, x_MK: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Write x · scale into `out`, which may be x itself, and return it."""
        return torch.mul(x_MK, scale, out=out)

    def transposed(self) -> PerColumn:
        """Return the granularity of the transpose."""
        return PerColumn()


@dataclass(frozen=True)
class PerColumn:
    """One scale for each column."""

    def scale_shape(self, shape2d: Shape2d) -> tuple[int, ...]:
        """Return the shape of the scale of a matrix: [1, K]."""
        return (1, shape2d[1])

    def amax(self, x_MK: Tensor) -> Tensor:
        """Return max |x| of every column, float32 [1, K]; 0 for an empty column."""
        require_matrix(x_MK)
        return _empty_amax(self, x_MK) if x_MK.numel() == 0 else _amax(x_MK, dim=0).unsqueeze(0)

    def expand(self, scale: Tensor, shape2d: Shape2d) -> Tensor:
        """Return the scale of every element, [M, K], without copying."""
        return scale.expand(shape2d)

    def multiply(self, x_MK: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Write x · scale into `out`, which may be x itself, and return it."""
        return torch.mul(x_MK, scale, out=out)

    def transposed(self) -> PerRow:
        """Return the granularity of the transpose."""
        return PerRow()


@dataclass(frozen=True)
class Block:
    """One scale for each block of `rows` x `cols` elements."""

    rows: int
    cols: int

    def __post_init__(self) -> None:
        for side, size in (("rows", self.rows), ("cols", self.cols)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ShapeError(f"a block needs whole sides of at least 1, found {side}={size!r}.")

    def scale_shape(self, shape2d: Shape2d) -> tuple[int, ...]:
        """Return the shape of the scale of a matrix: [ceil(M / rows), ceil(K / cols)]."""
        return (-(-shape2d[0] // self.rows), -(-shape2d[1] // self.cols))

    def amax(self, x_MK: Tensor) -> Tensor:
        """Return max |x| of every block, float32 [ceil(M / rows), ceil(K / cols)]."""
        require_matrix(x_MK)
        if x_MK.numel() == 0:
            return _empty_amax(self, x_MK)
        by_column_block = _amax_in_runs(x_MK, 1, self.cols)
        return by_column_block if self.rows == 1 else _amax_in_runs(by_column_block, 0, self.rows)

    def expand(self, scale: Tensor, shape2d: Shape2d) -> Tensor:
        """Return the scale of every element, [M, K], as a new tensor."""
        tall = self._rows_of(scale, shape2d[0])
        return tall.repeat_interleave(self.cols, 1)[:, : shape2d[1]]

    def multiply(self, x_MK: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Write x · scale into `out`, which may be x itself, and return it."""
        cols = x_MK.shape[1]
        whole = cols - cols % self.cols
        tall = self._rows_of(scale, x_MK.shape[0])
        if whole:
            runs = (x_MK.shape[0], whole // self.cols, self.cols)
            torch.mul(
                x_MK[:, :whole].view(runs),
                tall[:, : whole // self.cols].unsqueeze(2),
                out=out[:, :whole].view(runs),
            )
        if whole < cols:
            torch.mul(x_MK[:, whole:], tall[:, -1:], out=out[:, whole:])
        return out

    def transposed(self) -> Block:
        """Return the granularity of the transpose."""
        return Block(self.cols, self.rows)

    def _rows_of(self, scale: Tensor, rows: int) -> Tensor:
        return scale if self.rows == 1 else scale.repeat_interleave(self.rows, 0)[:rows]


Granularity: TypeAlias = PerTensor | PerRow | PerColumn | Block

BLOCK_1x128 = Block(1, 128)
BLOCK_128x128 = Block(128, 128)
BLOCK_1x32 = Block(1, 32)


def require_matrix(x: Tensor) -> None:
    """Raise ShapeError unless `x` has two dimensions."""
    if x.dim() != 2:
        raise ShapeError(f"a granularity speaks of a matrix [M, K], found shape {list(x.shape)}; flatten it.")


def _empty_amax(granularity: Granularity, x_MK: Tensor) -> Tensor:
    rows, cols = x_MK.shape
    return torch.zeros(granularity.scale_shape((rows, cols)), dtype=torch.float32, device=x_MK.device)


def _amax(x: Tensor, dim: int | None = None) -> Tensor:
    # |x| would be a copy of x; the two ends of the range are not. abs() turns the -0.0 of an all-zero
    # granule into 0.
    if dim is None:
        low, high = torch.aminmax(x)
    else:
        # CPU reductions of 16-bit floats along short runs cost several times what converting them does.
        x = x.float() if x.device.type == "cpu" else x
        low, high = x.amin(dim), x.amax(dim)
    return torch.maximum(high, -low).abs().float()


def _amax_in_runs(x: Tensor, dim: int, run: int) -> Tensor:
    size = x.shape[dim]
    whole = size - size % run
    parts = []
    if whole:
        sizes = list(x.shape)
        sizes[dim : dim + 1] = [whole // run, run]
        parts.append(_amax(x.narrow(dim, 0, whole).view(sizes), dim=dim + 1))
    if whole < size:
        parts.append(_amax(x.narrow(dim, whole, size - whole), dim=dim).unsqueeze(dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
