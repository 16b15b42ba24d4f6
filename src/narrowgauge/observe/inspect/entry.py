"""What is in a checkpoint before anything of it is read: names, shapes, dtypes.

open -> entries (from headers)    read(name) -> one tensor    the tensor is dropped before the next is read
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

# `SITE.x` of a dump, and `SITE@1.x` of a further microbatch; a site is `module:role`.
_DUMPED = re.compile(r":(input|weight|grad_output)(?:@\d+)?\.x")

_TAPS, _PATCH = 16, 33  # fewer along a line, and along a side: pictures are cut into patches of up to 32


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Args:
        name: its key; keys of nested dicts are joined by dots.
        shape: as stored; of a nested tensor, which has none, how many elements.
        dtype: torch's word for it ("bfloat16"), or the file's own where torch has none.
        tied_to: the first name of the same memory; "" if this is the first.
        optimizer: whether it belongs to an optimizer's state.
        why_not: why its values cannot be read; "" if they can.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tied_to: str = ""
    optimizer: bool = False
    why_not: str = ""

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def kernel(self) -> bool:
        """Whether it looks like a convolution's weight, [N, C, taps, ...], by its last dimension: nothing says so."""
        return len(self.shape) > 2 and self.shape[-1] < (_TAPS if len(self.shape) == 3 else _PATCH)


class Checkpoint(Protocol):
    """A file of tensors, or several behind one index."""

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def size(self) -> int:
        """Bytes on disk."""
        ...

    @property
    def entries(self) -> Sequence[Entry]:
        """What it holds."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a reader should know of how it was read."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor of that name, on the CPU; of a mapped file only what is touched comes into memory."""
        ...


def word(dtype: torch.dtype) -> str:
    """A dtype without its package: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def role_in(name: str) -> str:
    """As which operand a tensor was dumped, by its name; "" if the name does not say.

    >>> role_in("blocks.3.up:grad_output@1.x"), role_in("blocks.3.up.weight")
    ('grad_output', '')
    """
    _, colon, rest = name.rpartition(":")
    found = _DUMPED.fullmatch(colon + rest)
    return found[1] if found else ""


def names_an_optimizer(name: str) -> bool:
    """Whether a key says that it is an optimizer's: a part of it begins with `optim`."""
    return any(part.lower().startswith("optim") for part in name.split(".")[:-1])
