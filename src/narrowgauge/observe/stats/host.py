"""The usual case on the CPU, fast: what `tally` counts in sixty passes, counted in one compiled walk.

    x, q  ->  Counted: the packed vector without its columns, and the sums along columns

The same numbers as `tally`, in float64 throughout (see host_kernel); what is not all finite is left to it. The first
call of a process loads the compiled walk, the first ever compiles it; neither is what watching costs, so `ready` does
it beforehand.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.compute.quant import Block, PerColumn, PerRow, PerTensor, QTensor, torch_dtype
from narrowgauge.errors import ShapeError
from narrowgauge.formats import E4M3FN, Format
from narrowgauge.metrics import MOMENTS

Array = npt.NDArray[Any]

_log = logging.getLogger("narrowgauge.stats")

MARGIN = 1 + 2.0**-20  # amax * fl(448 / amax) exceeds 448 by an ulp in a fifth of all tensors


@dataclass(frozen=True)
class Counted:
    """What was counted of one tensor on the CPU.

    Args:
        vector: [width] float64, packed moments; no columns are in it yet.
        columns: [2, K] float64, sums of x^2 and e^2 along columns.
    """

    vector: Tensor
    columns: Tensor

    def note(self, slot: str, value: Tensor) -> None:
        """Fill a slot that the walk knows nothing of."""
        self.vector[MOMENTS.offsets[slot]] = value


@cache
def kernel() -> ModuleType | None:
    """The compiled walk, None where numba has no build for this machine."""
    try:
        from narrowgauge.observe.stats import host_kernel
    except ImportError:
        return None
    return host_kernel


@cache
def ready() -> bool:
    """Load the compiled walk for the dtypes of training, or compile it; whether there is one."""
    if kernel() is None:
        return False
    x = torch.ones(2, 2)
    codes = QTensor(x.to(torch.float8_e4m3fn), torch.tensor(1.0), E4M3FN, PerTensor())
    try:
        for dtype in (torch.float32, torch.bfloat16):
            count(x.to(dtype), codes, (0, 1), (0, 1))
            count_result(x.to(dtype), (x, x))
    except Exception as error:  # a compiler has many ways to fail, and training is not to feel any
        cause = " ".join(str(error).split())[:200]
        _log.warning("narrowgauge: the watch's fast walk cannot be compiled (%s); slower passes take its place.", cause)
        return False
    return True


def count(x_MK: Tensor, q: QTensor, sampled: tuple[int, int], summed: tuple[int, int]) -> Counted | None:
    """Count everything of a CPU tensor and of what became of it; None unless x, codes and scales are all finite.

    Args:
        x_MK: [M, K] of any float dtype (rounded to float32), detached, not empty.
        q: its codes and scale, of the same shape.
        sampled: first and stride of the rows that histograms and the higher moments are taken from.
        summed: the same of the rows that the sums along columns are over.
    """
    M, K = x_MK.shape
    bits, shift = _bits(x_MK)
    codes = q.codes.contiguous().view(torch.uint8).numpy()
    rows, cols = _granule(q)
    scale_RC = q.scale.reshape(-(-M // rows), -(-K // cols)).contiguous().numpy()
    vector, columns = MOMENTS.empty(), np.zeros((2, K))
    facts = np.array((*sampled, *summed, rows, cols))
    places, starts = _layout()
    if not _host().operand(
        bits, shift, codes, *_format(q.fmt), scale_RC, facts[4:], facts[:4], places, starts, vector, columns
    ):
        return None
    vector[MOMENTS.offsets["numel"]] = x_MK.numel()
    return Counted(torch.from_numpy(vector), torch.from_numpy(columns))


def count_result(y_MN: Tensor, check: tuple[Tensor, Tensor] | None = None) -> Tensor | None:
    """The head of the packed vector of a gemm's result [M, N] of any float dtype, detached; None unless finite.

    Args:
        y_MN: the result.
        check: a part of it and the same recomputed, any shape; what is not finite on either side is left out.

    Raises:
        ShapeError: the two parts have different shapes.
    """
    host = _host()
    head = MOMENTS.empty()[: MOMENTS.head_width]
    bits, shift = _bits(y_MN)
    if not host.result(bits, shift, _layout()[0], head):
        return None
    head[MOMENTS["numel"]] = y_MN.numel()
    if check is not None:
        got, want = check
        if got.shape != want.shape:
            raise ShapeError(f"a check compares equal shapes, found {list(got.shape)} beside {list(want.shape)}")
        parts = (_numpy(t.detach().float().contiguous().view(-1)) for t in (got, want))
        host.check(*parts, _check_places(), head)
    return torch.from_numpy(head)


def _host() -> ModuleType:
    host = kernel()
    assert host is not None  # the caller asked whether it is ready
    return host


def _bits(x: Tensor) -> tuple[Array, int]:
    """The bits of a matrix without gradients, and how far left they go to be float32's."""
    if not x.is_contiguous():
        x = x.contiguous()
    if x.dtype == torch.bfloat16:
        return _numpy(x.view(torch.uint16)), 16
    return _numpy((x if x.dtype == torch.float32 else x.to(torch.float32)).view(torch.int32)), 0


def _numpy(x: Tensor) -> Array:
    """The same memory as an array, through a storage of its own.

    What `Tensor.numpy` was called on can never be resized again. FSDP2 frees a gathered weight by resizing it, and
    these tensors are the program's.
    """
    return np.asarray(torch.from_dlpack(x).numpy())  # type: ignore[attr-defined]


def _granule(q: QTensor) -> tuple[int, int]:
    """Rows and columns of a granule."""
    M, K = q.shape
    match q.granularity:
        case PerRow():
            return 1, K
        case PerColumn():
            return M, 1
        case Block(rows, cols):
            return rows, cols
    return M, K


@cache
def _format(fmt: Format) -> tuple[Array, np.float32]:
    """What each code means, and the magnitude before rounding above which a number is saturated."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch_dtype(fmt))
    return codes.float().numpy(), np.float32(fmt.max * MARGIN)


@cache
def _layout() -> tuple[Array, Array]:
    """Where in the packed vector the walk's numbers go, and where its histograms begin and end."""
    host = _host()
    places = [MOMENTS.offsets[name] for name in (*host.COUNTED, *host.SAMPLED, *host.SCALES)]
    spans = [MOMENTS[name] for name in ("row_sqnr", "exponents", "block_range")]
    ends = [end for span in spans if isinstance(span, slice) for end in (span.start, span.stop)]
    return np.array(places), np.array(ends)


@cache
def _check_places() -> Array:
    return np.array([MOMENTS.offsets[name] for name in _host().CHECKED])
