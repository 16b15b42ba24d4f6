"""Did two runs start from the same weights and see the same data?

    digest(x) = sum_i  mix(bits(x_i) + i * 0x9E3779B97F4A7C15)   mod 2^64    order-sensitive, stays on x's device
    mix(z)    = (z ^ z >> 32) * 0xD6E8FEB86659FD93, twice
    chain     = chain * 0x9E3779B97F4A7C15 + digest              over tensors, in the order they were seen

`mix` is the multiply-and-fold step of the splitmix generators: without it, small integers such as token ids could be
swapped without changing the sum. This detects accidents, not attacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from narrowgauge.observe.stats import host
from narrowgauge.session.tensors.sharded import here

# As signed 64-bit integers.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FOLD = 0xD6E8FEB86659FD93 - (1 << 64)
# A float64 holds integers exactly up to 2^53; a digest is stored in a column of floats.
STORED_BITS = 52
PIECE = 1 << 22  # elements mixed at once: a weight as a whole might not find room on a full GPU
LARGE = 1 << 16  # elements from which on it is worth to have the walk compiled
Chained = Tensor | int
_GOLDEN, _FOLD, _HALF = np.int64(GOLDEN), np.int64(FOLD), np.int64(32)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(x: Tensor) -> Tensor:
    """A 64-bit order-sensitive sum of x's bits (any shape), as an int64 scalar on x's device."""
    found = _digest(x)
    return found if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.int64, device="cpu")


def _digest(x: Tensor) -> Chained:
    """The same; a number where it is known at once."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_contiguous():
        x = x.contiguous()
    start = x.data_ptr() if x.is_cpu and type(x) is Tensor and not x.is_neg() else 0
    if start:
        walk = host.kernel() if (host.prepare() if x.numel() >= LARGE else host.ready()) else None
        if walk is not None:
            found: int = walk.digest(start, x.numel(), x.element_size())
            return found
    flat = x.reshape(-1)
    if start:
        bits = flat.view(_BITS[flat.element_size()]).numpy()
        return _wrapped(sum(_mixed_here(bits[at : at + PIECE], at) for at in range(0, len(bits), PIECE)))
    pieces = flat.view(_BITS[flat.element_size()]).split(PIECE)
    sums = [_mixed(piece, at * PIECE) for at, piece in enumerate(pieces)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _mixed_here(bits: npt.NDArray[Any], first: int) -> int:
    """What `_mixed` gives, of an array: a small batch, as most are, in a third of the time."""
    mixed = np.arange(first, first + len(bits), dtype=np.int64)
    mixed *= _GOLDEN
    mixed += bits
    for _ in range(2):
        mixed ^= mixed >> _HALF
        mixed *= _FOLD
    return int(mixed.sum())


def _mixed(bits: Tensor, first: int) -> Tensor:
    """What elements from `first` on add to a digest; 16 bytes of memory for each, until it is known."""
    places = torch.arange(first, first + len(bits), device=bits.device, dtype=torch.int64)
    mixed = places.mul_(GOLDEN).add_(bits)
    for _ in range(2):
        mixed.bitwise_xor_(mixed >> 32).mul_(FOLD)
    return mixed.sum()


def chain(tensors: Iterable[Tensor], start: Chained | None = None) -> Chained | None:
    """Fold the digests of several tensors into one; None if there are none and nothing to continue."""
    folded = start
    for x in tensors:
        one = _digest(x)
        if folded is None:
            folded = one
        elif isinstance(folded, int) and isinstance(one, int):
            folded = _wrapped(folded * GOLDEN + one)
        else:
            home = one.device if isinstance(one, Tensor) else torch.device("cpu")
            folded = torch.as_tensor(folded, device=home) * GOLDEN + one
    return folded


def _wrapped(number: int) -> int:
    """As a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def weights_hash(named: Iterable[tuple[str, Any]]) -> str:
    """A hex digest over names, shapes and values, in the model's own order; of what is sharded, this rank's part.

    `named` are the items of a state dict. What a module adds that is no tensor (an extra state, often None), or makes
    in its first call, counts by its name alone.
    """
    seen: list[str] = []
    digests: list[Tensor] = []
    for name, x in named:
        if not isinstance(x, Tensor) or is_lazy(x):
            seen.append(name)
            continue
        seen.append(f"{name}{tuple(x.shape)}{x.dtype}")
        if x.device.type != "meta" and x.layout is torch.strided:
            digests.append(digest(here(x)).to("cpu", non_blocking=False))
    values = [int(d) for d in digests]
    return hashlib.sha256(repr((seen, values)).encode()).hexdigest()[:16]


def stored(chained: Chained) -> Tensor | float:
    """The digest's low bits as a float64 that holds them exactly."""
    if isinstance(chained, int):
        return float(chained & ((1 << STORED_BITS) - 1))
    return (chained & ((1 << STORED_BITS) - 1)).to(torch.float64)
