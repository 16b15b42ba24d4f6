"""What the compiled walks on the CPU are made of: floats and their bits, memory by its address, runs of rows.

    float32       s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm        |x| as an integer is ordered as |x| is
    bfloat16      s eeeeeeee mmmmmmm                        the upper half of one

Matrices come as addresses: making an array of a tensor costs more than counting a small one. Rows are contiguous.

numba makes an int64 of what it computes of two int32: half as many to an instruction, and more of them. So each such
result is made an int32 again, also where it could be nothing else.

numba keeps compiled code by the file of the function that was called from Python, and does not see that another file
which that one is made of has changed. Its PARTS make it see.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

Array = npt.NDArray[Any]
Number = Any  # a machine number of the width that the code says

MAGNITUDE: Number = np.int32(0x7FFFFFFF)
INFINITY: Number = np.int32(0x7F800000)
DIGITS: Number = np.int32(23)
BIAS = 127
ONE: Number = np.float32(1)
NONE: Number = np.float32(0)
WIDE = '"prefer-vector-width"="512"'
TOGETHER = 1 << 11  # elements of short rows that are taken at once

# Sums may be taken in any order and multiplications fused; NaN and Inf keep their meaning, and a division is one.
compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
# What rounds is done as it is written. (Left out, the caller's freedom would hold here too.)
exact = njit(cache=True, nogil=True, error_model="numpy", fastmath=False)


def _bitcast(source: Any, target: Any) -> Any:
    """What is the same bits as another type."""

    def typed(typing: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), build

    return intrinsic(typed)


as_float: Any = _bitcast(types.int32, types.float32)
as_bits: Any = _bitcast(types.float32, types.int32)
as_long: Any = _bitcast(types.float64, types.int64)


def _pointer(typing: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), build


pointer: Any = intrinsic(_pointer)


def _widely(typing: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        set.add(builder.function.attributes, WIDE)
        return context.get_dummy_value()

    return types.void(), build


# A function that says so computes in registers of 512 bits where there are some. For Intel's processors LLVM would take
# halves of them, as the older ones run slower while they use more; torch's own operations use all of them there.
widely: Any = intrinsic(_widely)


@compiled
def bits_of(x_at: Number, shift: int, start: int, size: int, room: Array) -> Array:
    """Elements of float32, or of bfloat16 (shift 16), from `start` on, as float32 bits; the latter are put into `room`.

    Nobody writes to what this returns: it may be the tensor.
    """
    widely()
    if not shift:
        return carray(pointer(x_at + 4 * start), (size,), np.int32)
    narrow = carray(pointer(x_at + 2 * start), (size,), np.uint16)
    bits = room[:size]
    for j in range(size):
        bits[j] = np.int32(narrow[j]) << np.int32(16)
    return bits


@compiled
def extremes(x_at: Number, shift: int, start: int, size: int) -> tuple[Number, Number]:
    """Bits of the largest magnitude, and of the smallest that is not zero; infinity's without one.

    Of bfloat16, in 16 bits: twice as many to an instruction.
    """
    widely()
    if shift:
        high, low = np.uint16(0), np.uint16(0xFFFF)
        narrow = carray(pointer(x_at + 2 * start), (size,), np.uint16)
        for j in range(size):
            half = np.uint16(narrow[j] & np.uint16(0x7FFF))
            high = max(high, half)
            low = min(low, np.uint16(half - np.uint16(1)))  # a zero wraps around and is the largest
        smallest = (np.int32(low) + np.int32(1)) << np.int32(16)
        return np.int32(np.int32(high) << np.int32(16)), np.int32(smallest) if high else INFINITY
    largest, least = np.int32(0), np.uint32(0xFFFFFFFF)
    wide = carray(pointer(x_at + 4 * start), (size,), np.int32)
    for j in range(size):
        magnitude = np.int32(wide[j] & MAGNITUDE)
        largest = max(largest, magnitude)
        least = min(least, np.uint32(magnitude - np.int32(1)))
    return largest, np.int32(least) + np.int32(1) if largest else INFINITY


@compiled
def together(K: int, stride: int, granules: int) -> int:
    """How many rows are one run of memory under one scale; short rows are not worth a loop of their own."""
    return max(1, TOGETHER // K) if granules == 1 and stride == K else 1


@compiled
def mean_of(x_at: Number, shift: int, size: int, room: Array) -> float:
    """The mean of the first numbers, about which all are summed: nothing cancels then.

    It may be far from the mean of all, if these few make up most of M2; that loses as many digits as n / size has.
    """
    widely()
    x = bits_of(x_at, shift, 0, size, room).view(np.float32)
    total = 0.0
    for j in range(size):
        total += np.float64(x[j])
    return total / size


@compiled
def scan(x_at: Number, shift: int, start: int, size: int, about: float) -> tuple[Number, Number, float, float]:
    """Of a run: bits of the largest and the smallest magnitude as in `extremes`, sum (x - about) and of its square.

    float32 is read once for all of it; of bfloat16 the extremes are quicker in 16 bits.
    """
    widely()
    total = energy = 0.0
    if shift:
        high, low = extremes(x_at, shift, start, size)
        narrow = carray(pointer(x_at + 2 * start), (size,), np.uint16)
        for j in range(size):
            v = np.float64(as_float(np.int32(np.int32(narrow[j]) << np.int32(16)))) - about
            total += v
            energy += v * v
        return high, low, total, energy
    largest, least = np.int32(0), np.uint32(0xFFFFFFFF)
    wide = carray(pointer(x_at + 4 * start), (size,), np.int32)
    for j in range(size):
        magnitude = np.int32(wide[j] & MAGNITUDE)
        largest = max(largest, magnitude)
        least = min(least, np.uint32(magnitude - np.int32(1)))
        v = np.float64(as_float(wide[j])) - about
        total += v
        energy += v * v
    return largest, np.int32(least) + np.int32(1) if largest else INFINITY, total, energy
