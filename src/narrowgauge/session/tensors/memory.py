"""Weights that are nothing but numbers in one device's memory: what those are told of them who go by addresses.

    CPU      float32: the compiled walk
    GPU      float32, bfloat16, float16: kernels

Nothing is detached and nothing asked twice: of many small weights this takes longer than reading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.session.tensors.sharded import PLAIN

Array = npt.NDArray[np.int64]

_TAKEN = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16, torch.float16)}


class Runs(NamedTuple):
    """Where some tensors are, but for empty ones.

    Args:
        ats, sizes: their addresses, and how many elements each has.
        kinds: their shapes and dtypes, and the device of all.
        elements: of all.
        numbers: the addresses once more.
        asked: addresses, shapes and dtypes of what was asked, empty ones too.
    """

    ats: Array
    sizes: Array
    kinds: tuple[list[torch.Size], list[torch.dtype], torch.device]
    elements: int
    numbers: list[int]
    asked: tuple[list[int], list[torch.Size], list[torch.dtype]]


def runs(tensors: Sequence[Tensor], known: Runs | None = None) -> Runs | None:
    """Where these are; None if there are none, or one of them is anything else, or its memory was freed.

    What was `known` of them is given back if it is still true.
    """
    if known is not None and _unmoved(tensors, known):
        return known
    if not tensors:
        return None
    device = tensors[0].device
    taken = _TAKEN.get(device.type, ())
    ats: list[int] = []
    sizes: list[int] = []
    shapes: list[torch.Size] = []
    dtypes: list[torch.dtype] = []
    for x in tensors:
        dtype = x.dtype
        if type(x) not in PLAIN or dtype not in taken or x.device != device or x.layout is not torch.strided:
            return None
        size = x.numel()
        if not size:
            continue
        at = x.data_ptr()
        if not at or not x.is_contiguous() or x.is_neg():
            return None
        if x.untyped_storage().nbytes() < dtype.itemsize * (x.storage_offset() + size):
            return None
        ats.append(at)
        sizes.append(size)
        shapes.append(x.shape)
        dtypes.append(dtype)
    if not ats:
        return None
    asked = [x.data_ptr() for x in tensors], [x.shape for x in tensors], [x.dtype for x in tensors]
    return Runs(np.array(ats, np.int64), np.array(sizes, np.int64), (shapes, dtypes, device), sum(sizes), ats, asked)


def _unmoved(tensors: Sequence[Tensor], known: Runs) -> bool:
    """Whether all that was found out still holds: what lies at the same address and is as large was not freed."""
    if not PLAIN.issuperset(map(type, tensors)):
        return False
    ats, shapes, dtypes = known.asked
    try:
        return (
            list(map(Tensor.data_ptr, tensors)) == ats
            and [x.shape for x in tensors] == shapes
            and [x.dtype for x in tensors] == dtypes
            and all(map(Tensor.is_contiguous, tensors))
            and not any(map(Tensor.is_neg, tensors))
        )
    except RuntimeError:  # what is sparse by now has no address
        return False
