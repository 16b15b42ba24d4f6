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

LINE = 16  # elements
BYTES = 4  # of one
FEW = 8  # lines
ROOM = 128 * LINE  # elements that are gathered before they are compared


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
def copied(x_ats: Array, copy_ats: Array, sizes: Array, stride: int, turn: int, held: Array) -> float:
    """Copy lines of runs of float32 numbers, and say in `held` how many numbers of each; the sum of squares of all."""
    squares = 0.0
    for i in range(sizes.size):
        x, total = _run(x_ats[i], sizes[i]), 0.0
        for j in range(sizes[i]):
            total += np.float64(x[j]) * np.float64(x[j])
        squares += total
        first, count, distance = _lines(sizes[i], stride, turn)
        held[i] = _gather(x_ats[i], sizes[i], first, count, distance, copy_ats[i])
    return squares


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
