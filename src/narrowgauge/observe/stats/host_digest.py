"""A CPU tensor's digest (`session.tensors.fingerprint`) in one walk; passes would each go through memory once more.

sum_i mix(bits(x_i) + i * GOLDEN)   mod 2^64
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from narrowgauge.observe.stats.host_bits import Array, Number, pointer

GOLDEN: Number = np.int64(0x9E3779B97F4A7C15 - (1 << 64))
FOLD: Number = np.int64(0xD6E8FEB86659FD93 - (1 << 64))

_compiled = njit(cache=True, nogil=True)


@_compiled
def _sum(bits: Array) -> Number:
    total = np.int64(0)
    for i in range(bits.size):
        z = np.int64(bits[i]) + np.int64(i) * GOLDEN
        z = (z ^ (z >> np.int64(32))) * FOLD
        z = (z ^ (z >> np.int64(32))) * FOLD
        total += z
    return total


@_compiled
def digest(address: int, size: int, width: int) -> Number:
    """The digest of `size` elements of `width` bytes; single bytes have no sign, the others do."""
    if width == 1:
        return _sum(carray(pointer(address), size, np.uint8))
    if width == 2:
        return _sum(carray(pointer(address), size, np.int16))
    if width == 4:
        return _sum(carray(pointer(address), size, np.int32))
    return _sum(carray(pointer(address), size, np.int64))
