"""A CPU tensor's digest (`session.tensors.fingerprint`) in one walk; passes would each go through memory once more.

block_b = sum_j  lo(word + KEYS[j]) * hi(word + KEYS[j])      mod 2^64, over the words of block b
digest  = sum_b  mix(block_b + (b + bytes) * GOLDEN)          mod 2^64
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from narrowgauge.observe.stats.digest_keys import BLOCK, FOLD, GOLDEN, HALF, KEYS, LOW
from narrowgauge.observe.stats.host_bits import Array, Number, pointer

# Of the file digest_keys.py; a test says the number.
KEYS_SUM = 1773942758

_compiled = njit(cache=True, nogil=True)


@_compiled
def _mix(z: Number) -> Number:
    z = (z ^ (z >> HALF)) * FOLD
    return (z ^ (z >> HALF)) * FOLD


@_compiled
def _block(words: Array) -> Number:
    total = np.int64(0)
    for j in range(words.size):
        k = words[j] + KEYS[j]
        total += (k & LOW) * ((k >> HALF) & LOW)
    return total


@_compiled
def digest(address: int, size: int) -> Number:
    """The digest of `size` bytes."""
    whole = size // 8
    words = carray(pointer(address), whole, np.int64)
    blocks = whole // BLOCK
    total = np.int64(0)
    for b in range(blocks):
        total += _mix(_block(words[b * BLOCK : (b + 1) * BLOCK]) + np.int64(b + size) * GOLDEN)
    left = size - 8 * blocks * BLOCK
    if left:
        rest = words[blocks * BLOCK :]
        last = _block(rest)
        if size % 8:  # the last bytes, with zeros behind
            octets, word = carray(pointer(address + 8 * whole), size % 8, np.uint8), np.int64(0)
            for j in range(octets.size):
                word |= np.int64(octets[j]) << np.int64(8 * j)
            k = word + KEYS[rest.size]
            last += (k & LOW) * ((k >> HALF) & LOW)
        total += _mix(last + np.int64(blocks + size) * GOLDEN)
    return total
