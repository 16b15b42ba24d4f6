"""How far float32 weights on the CPU are moved by a step (`session.tensors.movement`), in two walks of their memory.

    copied    before    sum x^2 over all of each; every k-th line of it is copied
    moved     after     sum over tensors  (lines / copied lines) sum over the copied (x - copy)^2

A line is what memory gives at once: of every k-th element all lines would be read. Where the first one is turns with
the recorded steps. Copies lie one behind the other, a short last line of a tensor included; one line counts
like another. Tensors of FEW lines are copied whole, for there each would stand for too much.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from narrowgauge.observe.stats.host_bits import Array, Number, compiled, pointer
from narrowgauge.observe.stats.host_team import by_all, mine, whom

# Of the files that this one is made of, see host_bits; a test says the number.
PARTS = 4089751846

LINE = 16  # elements
BYTES = 4  # of one
FEW = 8  # lines
ROOM = 128 * LINE  # elements that are gathered before they are compared
PIECE = 1 << 14  # elements that are squared by one thread
TOLD = 6  # numbers that say what is squared: arguments of `copied`, and where what is found is left


def _copy_line(typing: Any, to: Any, at: Any) -> Any:
    """LINE numbers from one address to another, by one load and one store: a loop would ask whether they overlap."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), LINE)
        there, here = (builder.inttoptr(address, line.as_pointer()) for address in args)
        builder.store(builder.load(here, align=BYTES, typ=line), there, align=BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


copy_line: Any = intrinsic(_copy_line)


@compiled
def _run(address: Number, size: int) -> Array:
    return carray(pointer(address), (size,), np.float32)


@compiled
def _gather(x_at: Number, size: int, first: int, count: int, stride: int, to: Number) -> int:
    """Copy so many lines of a run, from the line `first` on every `stride`-th; how many numbers that were."""
    whole = size // LINE
    for number in range(count):
        line = first + number * stride
        if line < whole:
            copy_line(to + BYTES * LINE * number, x_at + BYTES * LINE * line)
        else:
            short, copy = _run(x_at + BYTES * LINE * line, size % LINE), _run(to + BYTES * LINE * number, size % LINE)
            for j in range(size % LINE):
                copy[j] = short[j]
            return number * LINE + size % LINE
    return count * LINE


@compiled
def _lines(size: int, stride: int, turn: int) -> tuple[int, int, int]:
    """The first line that is copied of a run, how many are, and their distance."""
    lines = -(-size // LINE)
    if lines <= FEW:
        return 0, lines, 1
    first = turn % min(stride, lines)
    return first, -(-(lines - first) // stride), stride


@compiled
def copied(x_ats: Array, copy_ats: Array, sizes: Array, stride: int, turn: int, held: Array, team_at: Number) -> float:
    """Copy lines of runs of float32 numbers, and say in `held` how many numbers of each; the sum of squares of all.

    To the last bit the same, however many threads of the TEAM at `team_at` share the squares; 0 for none.
    """
    pieces, size = 0, 0
    for i in range(sizes.size):
        pieces += -(-sizes[i] // PIECE)
        size += sizes[i]
        first, count, distance = _lines(sizes[i], stride, turn)
        held[i] = _gather(x_ats[i], sizes[i], first, count, distance, copy_ats[i])
    told, sums = np.empty(TOLD, np.int64), np.empty(pieces)
    run, threads = whom(team_at, size)
    told[0], told[1], told[2], told[3] = team_at if run else 0, sizes.size, pieces, np.int64(sums.ctypes.data)
    told[4], told[5] = np.int64(x_ats.ctypes.data), np.int64(sizes.ctypes.data)
    _by_all(run, np.int64(told.ctypes.data), threads)
    squares = 0.0
    for piece in range(told[2]):
        squares += sums[piece]
    return squares


@compiled
def _squares(told_at: Number) -> None:
    """The sum of squares of each of the calling thread's pieces."""
    told = carray(pointer(told_at), (TOLD,), np.int64)
    x_ats, sizes = carray(pointer(told[4]), (told[1],), np.int64), carray(pointer(told[5]), (told[1],), np.int64)
    sums, before = carray(pointer(told[3]), (told[2],), np.float64), 0
    first, last = mine(told[0], told[2])
    for i in range(told[1]):
        pieces = -(-sizes[i] // PIECE)
        for piece in range(max(first - before, 0), min(last - before, pieces)):
            x, total = _run(x_ats[i] + BYTES * PIECE * piece, min(PIECE, sizes[i] - PIECE * piece)), 0.0
            for j in range(x.size):
                total += np.float64(x[j]) * np.float64(x[j])
            sums[before + piece] = total
        before += pieces


_by_all: Any = by_all(_squares)


@compiled
def moved(x_ats: Array, copy_ats: Array, sizes: Array, stride: int, turn: int) -> float:
    """The sum of squares of the differences between runs and what was copied of them, scaled up to all of each."""
    squares, room = 0.0, np.empty(ROOM, np.float32)
    for i in range(sizes.size):
        first, count, distance = _lines(sizes[i], stride, turn)
        total = 0.0
        for done in range(0, count, ROOM // LINE):
            some = min(ROOM // LINE, count - done)
            size = _gather(x_ats[i], sizes[i], first + done * distance, some, distance, room.ctypes.data)
            copy = _run(copy_ats[i] + BYTES * LINE * done, size)
            for j in range(size):
                by = np.float64(room[j]) - np.float64(copy[j])
                total += by * by
        if count:
            squares += total * (np.float64(-(-sizes[i] // LINE)) / np.float64(count))
    return squares
