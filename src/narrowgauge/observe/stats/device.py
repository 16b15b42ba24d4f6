"""On a GPU: counting what a rule would make of a tensor, by the kernels that quantize, told to keep no codes.

    one scale per tensor     its amax, then the counts          two reads, nothing written
    a given scale            amax and counts together           one read
    tiles, squares           amaxes and counts together         one read
    rows                     their amaxes, then the counts      two reads

The same kernels with the same rule, so the counts are those of a tensor that is quantized.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from narrowgauge.compute.kernels import Given
    from narrowgauge.compute.kernels.fused.moved import Copies
    from narrowgauge.compute.kernels.fused.watched.looks import Look
    from narrowgauge.compute.recipes import Operand


@functools.cache
def ready(device: torch.device) -> bool:
    """Whether these kernels run on a device: Triton is there, and a GPU that converts to FP8 (capability 8.9)."""
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def count(x_MK: Tensor, rule: Operand, look: Look, given: Given | None = None) -> None:
    """Fill `look` with what `rule` would make of x_MK, by a scale of its own or by a given one.

    Args:
        x_MK: what the look was opened for, on its device, which is the current one.
        rule: the one that it was opened for.
        look: where the sums go.
        given: for one scale per tensor; its `slot` is left alone.
    """
    _quantize().count(x_MK, rule, look, given)


@functools.cache
def _quantize() -> ModuleType:
    """Triton is slow to import, and not everywhere."""
    from narrowgauge.compute.kernels.fused import quantize

    return quantize


def copies(sizes: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device, stride: int) -> Copies:
    """Copies of every `stride`-th element of weights of these sizes, by which to see how far they move."""
    from narrowgauge.compute.kernels.fused.moved import Copies

    return Copies(sizes, dtypes, device, stride)
