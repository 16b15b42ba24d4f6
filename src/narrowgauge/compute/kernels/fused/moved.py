"""How far a step moves weights on a GPU (`session.tensors.movement`), in two launches for all of them.

    copied    before    sum x^2 over all of each; every `stride`-th element of it is copied
    moved     after     sum over tensors  (elements / copied) sum over the copied (x - copy)^2

Where the first copied element of a tensor is turns with the recorded steps. A program reads one piece of one tensor and
leaves its sum in its own place, so nothing depends on the order in which programs run. Copies are float32, one behind
the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.compute.kernels.fused.launch import Launch
from narrowgauge.compute.kernels.fused.rules import widen

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PIECE, BLOCK, WARPS = 1 << 16, 2048, 8  # elements per program, and per round
COLUMNS = 4  # of the table: address, elements, the piece's first element, where the tensor's copies begin

Array = npt.NDArray[np.int64]


@triton.jit
def _place(table_ptr, turn, stride, DTYPE: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """Of this program: the tensor and its size, the piece's first element, its tensor's copies; the first copied."""
    row = table_ptr + tl.program_id(0) * COLUMNS
    x_ptr = tl.load(row).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    size = tl.load(row + 1)
    return x_ptr, size, tl.multiple_of(tl.load(row + 2), 16), tl.load(row + 3), turn % tl.minimum(stride, size)


@triton.jit
def _copied_in(start, first, size, stride, PIECE: tl.constexpr):
    """Which of a tensor's copies are of a piece: the first, and the one behind the last."""
    end = tl.minimum(first + PIECE, size)
    return tl.cdiv(tl.maximum(first - start, 0), stride), tl.cdiv(tl.maximum(end - start, 0), stride)


@triton.jit(do_not_specialize=["stride", "turn"])
def _copied_weights(
    table_ptr, copies_ptr, sums_ptr, stride, turn, DTYPE: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    x_ptr, size, first, copies, start = _place(table_ptr, turn, stride, DTYPE, COLUMNS, ALIGNED)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for done in range(0, PIECE, BLOCK):
        at = first + done + lane
        x = widen(tl.load(x_ptr + at, mask=at < size, other=0.0))
        total += x * x
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total.to(tl.float64)))
    copy, end = _copied_in(start, first, size, stride, PIECE)
    while copy < end:
        mine = copy + lane
        x = widen(tl.load(x_ptr + start + mine * stride, mask=mine < end, other=0.0))
        tl.store(copies_ptr + copies + mine, x, mask=mine < end)
        copy += BLOCK


@triton.jit(do_not_specialize=["stride", "turn"])
def _moved_weights(
    table_ptr, copies_ptr, sums_ptr, stride, turn, DTYPE: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    x_ptr, size, first, copies, start = _place(table_ptr, turn, stride, DTYPE, COLUMNS, ALIGNED)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    copy, end = _copied_in(start, first, size, stride, PIECE)
    while copy < end:
        mine = copy + lane
        x = widen(tl.load(x_ptr + start + mine * stride, mask=mine < end, other=0.0))
        by = x - tl.load(copies_ptr + copies + mine, mask=mine < end, other=0.0)
        total += by * by
        copy += BLOCK
    of_each = size.to(tl.float64) / tl.cdiv(size - start, stride).to(tl.float64)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total.to(tl.float64)) * of_each)


class Copies:
    """Copies of tensors that are nothing but memory on one device, and how far these have moved since.

    What a copy is in belongs to who asked for it.

    Args:
        sizes: their numbers of elements, none of them 0.
        dtypes: theirs, each one of DTYPES.
        device: where they are; the current one in every call.
        stride: of so many elements one is copied.
    """

    def __init__(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device, stride: int) -> None:
        self.stride, self._device, self._ats = stride, device, [0]
        begins = np.cumsum([0, *(-(-size // stride) for size in sizes)])
        pieces = [_pieces(size, int(begin)) for size, begin in zip(sizes, begins[:-1], strict=True)]
        self._by_dtype = [
            (dtype, [at for at, its in enumerate(dtypes) if its is dtype]) for dtype in dict.fromkeys(dtypes)
        ]
        order = [at for _, mine in self._by_dtype for at in mine]
        self._order = np.repeat(order, [len(pieces[at]) for at in order])  # which tensor each row is of
        self._rows = np.concatenate([pieces[at] for at in order])
        self._counts = [sum(len(pieces[at]) for at in mine) for _, mine in self._by_dtype]
        self.elements = int(begins[-1])
        self._sums = torch.empty(len(self._rows), dtype=torch.float64, device=device)
        self._launches: list[tuple[Tensor, Tensor, Launch, Launch]] = []

    def copy(self, ats: list[int], turn: int) -> tuple[Tensor, Tensor]:
        """Copy what is at these addresses: the sum of squares of all its elements, [] float64, and the copies."""
        copies = torch.empty(self.elements, dtype=torch.float32, device=self._device)
        for table, sums, copied, _ in self._ready(ats):
            copied((table, copies, sums), (self.stride, turn))
        return self._sums.sum(), copies

    def moved(self, ats: list[int], turn: int, copies: Tensor) -> Tensor:
        """The sum of squares of the differences since `copy` in the same turn, scaled up to all elements, [] float64.

        The tensors may be elsewhere by now.
        """
        for table, sums, _, moved in self._ready(ats):
            moved((table, copies, sums), (self.stride, turn))
        return self._sums.sum()

    def _ready(self, ats: list[int]) -> list[tuple[Tensor, Tensor, Launch, Launch]]:
        """What is launched for each dtype: the pieces of its tensors, where their sums go, and both kernels."""
        if ats == self._ats:
            return self._launches
        self._ats = []  # until all is ready: it may fail on the way
        self._rows[:, 0] = np.array(ats, np.int64)[self._order]
        rows = torch.from_numpy(self._rows)  # pinned, it is copied before it can change again
        table = rows.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else rows.clone()
        parts = zip(self._by_dtype, table.split(self._counts), self._sums.split(self._counts), strict=True)
        launches = []
        for (dtype, mine), places, sums in parts:
            constants = DTYPES[dtype], COLUMNS, all(ats[at] % 16 == 0 for at in mine), PIECE, BLOCK
            copied, moved = (
                Launch(kernel, len(places), (), constants, num_warps=WARPS)
                for kernel in (_copied_weights, _moved_weights)
            )
            launches.append((places, sums, copied, moved))
        self._launches, self._ats = launches, list(ats)
        return launches


def _pieces(size: int, begins: int) -> Array:
    """Rows of the table for one tensor, whose address is still missing."""
    firsts = np.arange(0, size, PIECE, dtype=np.int64)
    return np.stack([np.zeros_like(firsts), np.full_like(firsts, size), firsts, np.full_like(firsts, begins)], 1)
