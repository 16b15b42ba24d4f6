"""The numbers of a digest (`session.tensors.fingerprint`), for every way to it; as signed 64-bit integers.

What numba has compiled holds them, and does not see that this file has changed: `host_digest.KEYS_SUM` makes it see.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

GOLDEN = np.int64(0x9E3779B97F4A7C15 - (1 << 64))
FOLD = np.int64(0xD6E8FEB86659FD93 - (1 << 64))
HALF, LOW = np.int64(32), np.int64(0xFFFFFFFF)
BLOCK = 1024  # words that are summed before they are mixed


def mix(z: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The multiply-and-fold step of the splitmix generators, twice, in place."""
    for _ in range(2):
        z ^= z >> HALF
        z *= FOLD
    return z


# Of SHAKE-128: as `mix` doubles what is doubled, keys that it made would be each other's doubles here and there.
KEYS = np.frombuffer(hashlib.shake_128(b"narrowgauge").digest(8 * BLOCK), dtype="<i8")
