"""Did two runs start from the same weights and see the same data?

    word_j(x)  = 8 bytes of x from its byte 8 j on, little-endian, the last with zeros behind
    block_b(x) = sum_j  lo(word_j + KEY_j) * hi(word_j + KEY_j)           mod 2^64, over 1,024 words; halves of 32 bits
    digest(x)  = sum_b  mix(block_b + (b + bytes(x)) * 0x9E3779B97F4A7C15)       mod 2^64, stays on x's device
    mix(z)     = (z ^ z >> 32) * 0xD6E8FEB86659FD93, twice; KEY_j = the j-th 8 bytes of SHAKE-128("narrowgauge")
    chain      = chain * 0x9E3779B97F4A7C15 + digest                  over tensors, in the order they were seen

A block is hashed as UMAC's NH does it (RFC 4418): two blocks that differ give the same with a chance of 2^-32, and a
processor multiplies 32-bit numbers as fast as it reads them. What counts is memory: the same numbers in another type
are other data. This detects accidents, not attacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrowgauge.observe.stats import host
from narrowgauge.observe.stats.digest_keys import BLOCK, FOLD, GOLDEN, HALF, KEYS, LOW, mix
from narrowgauge.session.tensors.sharded import here
from narrowgauge.session.tensors.storage import address_of

# A float64 holds integers exactly up to 2^53; a digest is stored in a column of floats.
STORED_BITS = 52
PIECE = 1 << 11  # blocks hashed at once: a weight as a whole might not find room on a full GPU
LARGE = 1 << 16  # elements from which on it is worth to have the walk compiled
Chained = Tensor | int
OCTETS = 8 * BLOCK
_known_keys: dict[torch.device, Tensor] = {}
_GOLDEN, _FOLD, _LOW = int(GOLDEN), int(FOLD), int(LOW)


def digest(x: Tensor) -> Tensor:
    """A 64-bit order-sensitive sum of x's bits (any shape), as an int64 scalar on x's device."""
    found = _digest(x)
    return found if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.int64, device="cpu")


def _digest(x: Tensor) -> Chained:
    """The same; a number where it is known at once."""
    if x.requires_grad or type(x) is not Tensor:
        x = x.detach()
    if x.dtype.is_complex:
        x = torch.view_as_real(x.resolve_conj())
    if x.is_neg():
        x = x.resolve_neg()
    if not x.is_contiguous():
        x = x.contiguous()
    start = x.data_ptr() if x.is_cpu and type(x) is Tensor else 0
    if start:
        walk = host.kernel() if (host.prepare() if x.numel() >= LARGE else host.ready()) else None
        if walk is not None:
            found: int = walk.digest(start, x.nbytes)
            return found
    return _of_array(np.asarray(_Octets(x, start))) if start else _of_bytes(x.reshape(-1).view(torch.uint8))


class _Octets:
    """A contiguous tensor's bytes for numpy, read by address.

    `Tensor.numpy()` would forbid to resize the storage for as long as it lives, and FSDP2 frees gathered weights so.
    """

    def __init__(self, x: Tensor, start: int) -> None:
        self._held = x
        self.__array_interface__ = {"data": (start, True), "shape": (x.nbytes,), "typestr": "|u1", "version": 3}


def _of_array(octets: npt.NDArray[np.uint8]) -> int:
    """What `_of_bytes` gives: of a small batch, as most are, in a third of the time."""
    size, found = len(octets), 0
    for at, whole, rest in _parts(size):
        found += _hashed_here(octets[at:whole].view(np.int64).reshape(-1, BLOCK), at // OCTETS + size)
        if whole < rest:
            words = np.pad(octets[whole:rest], (0, (whole - rest) % 8)).view(np.int64)
            found += _hashed_here(words.reshape(1, -1), whole // OCTETS + size)
    return _wrapped(found)


def _parts(size: int) -> Iterator[tuple[int, int, int]]:
    """Where each piece begins, its whole blocks end, and it ends."""
    for at in range(0, size, PIECE * OCTETS):
        end = min(at + PIECE * OCTETS, size)
        yield at, end - (end - at) % OCTETS, end


def _hashed_here(blocks: npt.NDArray[np.int64], first: int) -> int:
    """What `_hashed` gives."""
    keyed = blocks + KEYS[: blocks.shape[1]]
    low = keyed & LOW
    keyed >>= HALF
    keyed &= LOW
    keyed *= low
    hashed = np.arange(first, first + len(blocks), dtype=np.int64)
    hashed *= GOLDEN
    hashed += keyed.sum(1)
    return int(mix(hashed).sum())


def _of_bytes(octets: Tensor) -> Tensor:
    """The digest of bytes on any device."""
    size, keys, sums = len(octets), _keys(octets.device), []
    aligned = octets.storage_offset() % 8 == 0 and address_of(octets) % 8 == 0
    for at, whole, rest in _parts(size):
        piece = octets[at:rest] if aligned else octets[at:rest].clone()
        blocks, last = piece[: whole - at], piece[whole - at :]
        if len(blocks):
            sums.append(_hashed(blocks.view(torch.int64).view(-1, BLOCK), at // OCTETS + size, keys))
        if len(last):
            words = torch.nn.functional.pad(last, (0, -len(last) % 8)).view(torch.int64)
            sums.append(_hashed(words.view(1, -1), whole // OCTETS + size, keys))
    if len(sums) == 1:
        return sums[0]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=octets.device)


def _hashed(blocks: Tensor, first: int, keys: Tensor) -> Tensor:
    """What blocks from place `first` on add to a digest; 16 bytes of memory for each word, until it is known."""
    keyed = blocks + keys[: blocks.shape[1]]
    low = keyed & _LOW
    hashed = keyed.bitwise_right_shift_(32).bitwise_and_(_LOW).mul_(low).sum(1)
    places = torch.arange(first, first + len(blocks), device=blocks.device, dtype=torch.int64)
    mixed = places.mul_(_GOLDEN).add_(hashed)
    for _ in range(2):
        mixed.bitwise_xor_(mixed >> 32).mul_(_FOLD)
    return mixed.sum()


def _keys(device: torch.device) -> Tensor:
    """On a device, once."""
    keys = _known_keys.get(device)
    if keys is None:
        keys = torch.from_numpy(KEYS.copy()).to(device)
        if type(keys) is Tensor:  # a mode of the program's may make another of it
            _known_keys[device] = keys
    return keys


def chain(tensors: Iterable[Tensor], start: Chained | None = None) -> Chained | None:
    """Fold the digests of several tensors into one; None if there are none and nothing to continue."""
    folded = start
    for x in tensors:
        one = _digest(x)
        if folded is None:
            folded = one
        elif isinstance(folded, int) and isinstance(one, int):
            folded = _wrapped(folded * _GOLDEN + one)
        else:
            home = one.device if isinstance(one, Tensor) else torch.device("cpu")
            folded = torch.as_tensor(folded, device=home) * _GOLDEN + one
    return folded


def _wrapped(number: int) -> int:
    """As a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def weights_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and tensors in the order of the model's state dict, and None for an extra state.

    `state_dict` itself, its hooks and `get_extra_state` may be the program's, and do what it likes.
    """
    below: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
    while below:
        prefix, module, around = below.pop()
        kept = {name: x for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, x in (*module._parameters.items(), *kept.items()):
            if x is not None:
                yield prefix + name, x
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}_extra_state", None
        around |= {id(module)}
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        below += [(f"{prefix}{name}.", child, around) for name, child in reversed(children) if id(child) not in around]


def weights_hash(named: Iterable[tuple[str, Any]]) -> str:
    """A hex digest over names, shapes and values, in the model's own order; of what is sharded, this rank's part.

    `named` are the items of `weights_of`, or of a state dict. What a module adds that is no tensor (an extra state,
    often None), or makes in its first call, counts by its name alone.
    """
    seen: list[str] = []
    digests: list[Tensor] = []
    for name, x in named:
        if not isinstance(x, Tensor) or is_lazy(x):
            seen.append(name)
            continue
        seen.append(f"{name}{tuple(x.shape)}{x.dtype}")
        if x.device.type != "meta" and x.layout is torch.strided:
            digests += [digest(part).to("cpu", non_blocking=False) for part in _parts_of(here(x))]
    values = [int(d) for d in digests]
    return hashlib.sha256(repr((seen, values)).encode()).hexdigest()[:16]


def _parts_of(x: Any) -> Iterator[Tensor]:
    """What holds x's bits: x, or the tensors that it wraps, for a quantized weight of torchao's has no bytes itself."""
    if type(x) is Tensor or address_of(x) or not is_traceable_wrapper_subclass(x):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:
        yield from _parts_of(here(getattr(x, name)))


def stored(chained: Chained) -> Tensor | float:
    """The digest's low bits as a float64 that holds them exactly."""
    if isinstance(chained, int):
        return float(chained & ((1 << STORED_BITS) - 1))
    return (chained & ((1 << STORED_BITS) - 1)).to(torch.float64)
