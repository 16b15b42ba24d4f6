"""The usual case on the CPU, fast: what `tally` counts in sixty passes, counted in one compiled walk.

    count        x, q     ->  Counted: the packed vector, and the sums along columns
    judge        x, rule  ->  the same, of the codes that x would become by the rule
    as_before    x, rule  ->  what `judge` found out, for whatever lies as x does

The same numbers as `tally`, in float64 throughout (see host_kernel); what is not all finite is left to it. All of this
is only to be called where it is `ready` (see host_ready).

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from narrowgauge.compute.quant import Block, Granularity, PerColumn, PerRow, QTensor, Scaling
from narrowgauge.compute.recipes import Operand
from narrowgauge.errors import ShapeError
from narrowgauge.formats import Format
from narrowgauge.metrics import MOMENTS
from narrowgauge.observe.stats import team
from narrowgauge.observe.stats.host_ready import kernel, prepare, ready, wait, why_not

Array = npt.NDArray[Any]
Share = tuple[int, int]  # first and stride of some rows
Told = tuple[Array, Array, int, int]  # room for ASKED with what comes behind it; LIMITS; rows and columns of a granule

__all__ = [
    "NUMEL",
    "AsBefore",
    "Counted",
    "as_before",
    "count",
    "count_result",
    "in_memory",
    "judge",
    "kernel",
    "prepare",
    "ready",
    "wait",
    "why_not",
]

E8M0 = (None, "up", "ocp")
MARGIN = 1 + 2.0**-20  # amax * fl(448 / amax) exceeds 448 by an ulp in a fifth of all tensors
MOST_RULES = 4096
UNSCALED = Scaling("none")

_PLAIN = frozenset((Tensor, nn.Parameter))
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16}
_RULES: dict[tuple[int, int, int], tuple[Operand, Told]] = {}  # holds the rule, lest its id become another's


@dataclass(eq=False, slots=True)
class Counted:
    """What was counted of one tensor on the CPU.

    Args:
        vector: [width] float64, packed moments.
        columns: [2, K] float64, sums of x^2 and e^2 along columns, by which the vector's columns were counted.
    """

    vector: Array
    columns: Array

    def note(self, slot: str, value: Tensor) -> None:
        """Fill a slot that the walk knows nothing of."""
        self.vector[MOMENTS.offsets[slot]] = float(value)

    def parts(self) -> tuple[Tensor, Tensor]:
        """Vector and columns; columns are to be counted anew, when those of other parts were added."""
        self.vector[MOMENTS["col_sqnr"]] = 0.0
        return torch.from_numpy(self.vector), torch.from_numpy(self.columns)


def count(x_MK: Tensor, q: QTensor, sampled: Share, compared: Share, vector: Array | None = None) -> Counted | None:
    """Count everything of a CPU tensor and of what became of it; None unless x, codes and scales are all finite.

    Args:
        x_MK: [M, K] of any float dtype (rounded to float32), not empty.
        q: its codes and scale, of the same shape.
        sampled: first and stride of the rows that histograms and the higher moments are taken from.
        compared: the same of the rows whose errors are summed, along columns too, and scaled up to all rows.
        vector: neutral moments [width] to be filled, new ones if none are given. Without a result it holds nothing
            of use.
    """
    codes, scale = q.codes.contiguous(), q.scale.contiguous()
    told = *_behind(q.fmt), *_granule(q.granularity, *x_MK.shape)
    return _walk(x_MK, told, (codes.data_ptr(), scale.data_ptr()), sampled, compared, vector)


def judge(x_MK: Tensor, rule: Operand, sampled: Share, compared: Share, vector: Array | None = None) -> Counted | None:
    """Count what `quantize` would make of a CPU tensor by a rule, and make nothing; None unless x is all finite.

    Arguments as for `count`.
    """
    return _walk(x_MK, _by_rule(rule, *x_MK.shape), (0, 0), sampled, compared, vector)


class AsBefore(NamedTuple):
    """What is known of tensors that lie as one before: `walk(address, turn, asked, limits, vector, sums)` counts them.

    `sums` are zeros [2, columns].

    Attributes:
        walk: the compiled one.
        asked, limits: what it is told.
        size, nbytes, columns: numbers of the matrix, their bytes, and numbers of a row.
        shared: whether torch's threads share it, of whom OpenMP has to be told.
    """

    walk: Callable[[int, int, Array, Array, Array, Array], bool]
    asked: Array
    limits: Array
    size: int
    nbytes: int
    columns: int
    shared: bool


def as_before(x_MK: Tensor, rule: Operand, strides: Share) -> AsBefore | None:
    """What `judge` finds out for whatever lies as x_MK does, of the same dtype; None where that is copied.

    `strides` are those of the rows that are sampled and compared; a turn says which of them.
    """
    if type(x_MK) not in _PLAIN or x_MK.dtype not in _SHIFTS or not x_MK.is_contiguous():
        return None
    (M, K), size, told = x_MK.shape, x_MK.numel(), _by_rule(rule, *x_MK.shape)
    asked = _asked(told, M, K, _SHIFTS[x_MK.dtype], K, (0, 0), (0, strides[0]), (0, strides[1]))
    return AsBefore(_host().operand, asked, told[1], size, size * x_MK.itemsize, K, size >= _host().SHARED)


def _by_rule(rule: Operand, M: int, K: int) -> Told:
    """What the walk is told of a rule. To find it by what the rule says would take longer than to find all else."""
    key = id(rule), M, K
    known = _RULES.get(key)
    if known is None:
        if len(_RULES) >= MOST_RULES:
            _RULES.clear()
        behind = _behind(rule.fmt, rule.scaling, rule.margin)
        known = _RULES[key] = rule, (*behind, *_granule(rule.granularity, M, K))
    return known[1]


@lru_cache(64)
def _behind(fmt: Format, scaling: Scaling = UNSCALED, margin: int = 0) -> tuple[Array, Array]:
    """Room for ASKED with what comes behind it, and LIMITS."""
    facts, limits = _numbers(fmt, scaling, margin)
    return np.concatenate((np.zeros(len(_host().ASKED), np.int64), facts, *_layout())), limits


def _asked(
    told: Told, M: int, K: int, shift: int, stride: int, at: tuple[int, int], sampled: Share, compared: Share
) -> Array:
    """All that is asked of a matrix; `at` is where codes and scales are, 0 without."""
    behind, _, tall, wide = told
    asked = behind.copy()
    asked[: len(_host().ASKED)] = shift, stride, *at, *sampled, *compared, M, K, tall, wide, team.address()
    return asked


def _walk(
    x_MK: Tensor, told: Told, at: tuple[int, int], sampled: Share, compared: Share, vector: Array | None = None
) -> Counted | None:
    x = _readable(x_MK)
    if x is None:
        return None
    M, K = x_MK.shape
    vector, columns = MOMENTS.empty() if vector is None else vector, np.zeros((2, K))
    asked = _asked(told, M, K, _SHIFTS[x.dtype], x.stride(0), at, sampled, compared)
    if not _host().operand(x.data_ptr(), 0, asked, told[1], vector, columns):
        return None
    vector[NUMEL] = M * K
    return Counted(vector, columns)


def count_result(y_MN: Tensor, check: tuple[Tensor, Tensor] | None = None) -> Array | None:
    """The head of the packed vector of a gemm's result [M, N] of any float dtype; None unless finite.

    Args:
        y_MN: the result.
        check: a part of it and the same recomputed, any shape; what is not finite on either side is left out.

    Raises:
        ShapeError: the two parts have different shapes.
    """
    y = _readable(y_MN)
    if y is None:
        return None
    got = want = None
    if check is not None:
        if check[0].shape != check[1].shape:
            raise ShapeError(
                f"a check compares equal shapes, found {list(check[0].shape)} beside {list(check[1].shape)}"
            )
        got, want = (t.float().contiguous() for t in check)
    head = _NEUTRAL_HEAD.copy()
    beside = (0, 0, 0) if got is None or want is None else (got.data_ptr(), want.data_ptr(), got.numel())
    (M, N), (walk, *layout) = y.shape, _result()
    if not walk.result(y.data_ptr(), _SHIFTS[y.dtype], M, N, y.stride(0), *beside, *layout, head):
        return None
    head[NUMEL] = M * N
    return head


NUMEL = MOMENTS.offsets["numel"]
_NEUTRAL_HEAD = MOMENTS.empty()[: MOMENTS.head_width].copy()


def _host() -> ModuleType:
    host = kernel()
    assert host is not None  # the caller asked whether it is ready
    return host


def _readable(x: Tensor) -> Tensor | None:
    """A matrix as float32 or bfloat16 with rows in one piece; None for one that is no plain memory."""
    if type(x) not in _PLAIN or x.is_neg():
        return None
    if x.dtype not in _SHIFTS:
        x = x.detach().to(torch.float32)
    if x.is_contiguous():
        end = x.storage_offset() + x.numel()
        return x if x.data_ptr() and x.untyped_storage().nbytes() >= end * x.itemsize else None
    if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        x = x.detach().contiguous()
    return x if in_memory(x) else None


def in_memory(x: Tensor) -> bool:
    """Whether a strided tensor's owner has not freed it. (A view of what was freed may still have an address.)"""
    size = x.numel()
    if not size:
        return True
    if not x.is_contiguous():
        size = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() != 0 and x.untyped_storage().nbytes() >= (x.storage_offset() + size) * x.itemsize


def _granule(granularity: Granularity, M: int, K: int) -> tuple[int, int]:
    """Rows and columns of a granule."""
    match granularity:
        case PerRow():
            return 1, K
        case PerColumn():
            return M, 1
        case Block(rows, cols):
            return rows, cols
    return M, K


def _numbers(fmt: Format, scaling: Scaling = UNSCALED, margin: int = 0) -> tuple[Array, Array]:
    """A format and a rule as the walk wants them: FACTS and LIMITS."""
    if fmt.has_negative_zero:
        nan = 0, 0x7F, fmt.max_code + 1
    else:  # 0x80 is no zero but the NaN; a turn makes it the last code
        nan = 0x7F, 0xFF, 0xFF
    facts = (fmt.mantissa_bits, fmt.bias, *nan, scaling.power_of_two, E8M0.index(scaling.e8m0), fmt.emax, margin)
    limits = (fmt.max, fmt.max * MARGIN, fmt.max * 2.0**-margin, scaling.amax_floor)
    return np.array(facts, np.int64), np.array(limits, np.float32)


@cache
def _layout() -> tuple[Array, Array]:
    """Where in the packed vector the walk's numbers go, and where its histograms begin and end."""
    host = _host()
    places = [MOMENTS.offsets[name] for name in (*host.COUNTED, *host.SAMPLED, *host.SCALES)]
    spans = [MOMENTS[name] for name in ("row_sqnr", "exponents", "block_range", "col_sqnr")]
    ends = [end for span in spans if isinstance(span, slice) for end in (span.start, span.stop)]
    return np.array(places), np.array(ends)


@cache
def _result() -> tuple[ModuleType, Array, Array]:
    """The walks, and where a result's numbers go, and those of its check."""
    return _host(), _layout()[0], np.array([MOMENTS.offsets[name] for name in _host().CHECKED])
