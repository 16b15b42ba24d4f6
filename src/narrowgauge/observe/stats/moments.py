"""The packed moments of one tensor: everything that the metrics need, as one vector on the tensor's device.

    moments(x, q) -> [width] float64, slots as in `metrics.MOMENTS`

Nothing is read back from a device. There, large tensors are walked in runs of rows, which bounds the memory needed to
a few copies of one run; the runs merge by the law that merges microbatches. On the CPU one compiled walk sees it all.

What is taken from a share of the rows comes from rows first, first + every, ... of the whole tensor, whichever way it
is counted; `shares` says which. Exact over all elements: extremes, counts, mean and M2.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from torch import Tensor

from narrowgauge.compute.quant import Block, PerColumn, PerTensor, QTensor
from narrowgauge.errors import ShapeError
from narrowgauge.metrics.primes import last_prime
from narrowgauge.observe.stats import host
from narrowgauge.observe.stats.merging import empty
from narrowgauge.observe.stats.packing import Packer
from narrowgauge.observe.stats.tally import Tally, tally

CPU, ELSEWHERE = True, False
RUN = {CPU: 1 << 19, ELSEWHERE: 1 << 24}  # elements looked at together; a GPU wants large launches
SAMPLE = {CPU: 1 << 11, ELSEWHERE: 1 << 18}  # elements that histograms and higher moments come from, at least
# On the CPU errors and sums along columns come from at least so many elements, rows, and one of so many rows.
COMPARED, COMPARED_ROWS, MOST = 1 << 13, 64, 32
LARGE, LARGE_ROWS = 1 << 15, 256  # of a tensor with fewer elements or rows, from all


def moments(x: Tensor, q: QTensor, *, offset: int | None = None) -> Tensor:
    """Packed moments of a tensor and of its codes.

    Args:
        x: [..., K] of any float dtype; all leading dimensions are rows.
        q: its codes and scale, [M, K].
        offset: None looks at all rows; a number takes histograms, kurtosis and, on the CPU, errors from a share of
            the rows if the tensor is large, another one for every number.

    Returns:
        [width] float64 on x's device.

    Raises:
        ShapeError: x and q have different shapes.
    """
    tallies = tallies_of(x, q, offset)
    if not tallies:
        return empty(x.device)
    packer = Packer()
    packer.add("", tallies)
    return packer.pack()[1][0]


def tallies_of(
    x: Tensor, q: QTensor, offset: int | None, room: Callable[[], host.Array] | None = None
) -> list[Tally | host.Counted]:
    """What was counted of all runs of rows of a tensor; nothing of an empty one. Arguments as for `moments`.

    `room` gives neutral moments, [width], that are filled on the CPU.
    """
    if not x.numel():
        return []
    x_MK = x if x.dim() == 2 else x.detach().reshape(-1, x.shape[-1])
    if tuple(x_MK.shape) != tuple(q.shape):
        raise ShapeError(
            f"the tensor is {list(x.shape)}, as rows {list(x_MK.shape)}, but its codes are {list(q.shape)};"
            " give the tensor that was quantized"
        )
    if x.device.type == "cpu" and host.ready():
        M, K = x_MK.shape
        counted = host.count(x_MK, q, *shares(M, K, offset), None if room is None else room())
        if counted is not None:
            return [counted]
    whole = _compared_are_zeros(x_MK, offset)
    return [tally(part, codes, *_rows(x_MK, start, len(part), offset, whole)) for start, part, codes in _runs(x_MK, q)]


def shares(M: int, K: int, offset: int | None, cpu: bool = True) -> tuple[host.Share, host.Share]:
    """First and stride of the rows that histograms are taken from, and of those that are compared with their codes.

    They hold at least SAMPLE and COMPARED elements, the latter at least COMPARED_ROWS rows and one of MOST. Of what is
    not LARGE, and elsewhere than on the CPU, all rows are compared. Which ones they are turns with `offset`. Strides
    are primes: heads and positions repeat after powers of two, and a stride that such a number divides would meet but
    one of them.
    """
    if offset is None:
        return (0, 1), (0, 1)
    sampled, compared = strides(M, K, cpu)
    return (offset % sampled, sampled), (offset % compared, compared)


@lru_cache(1024)
def strides(M: int, K: int, cpu: bool = True) -> tuple[int, int]:
    """The strides of `shares`."""
    sampled = last_prime(min(M, M * K // SAMPLE[cpu]))
    large = cpu and M >= LARGE_ROWS and M * K >= LARGE
    compared = last_prime(min(MOST, M // COMPARED_ROWS, M * K // COMPARED)) if large else 1
    return sampled, compared


def _compared_are_zeros(x_MK: Tensor, offset: int | None) -> bool:
    """Whether a share of the rows would be compared that holds nothing, while others hold something."""
    if x_MK.device.type != "cpu":
        return False
    M, K = x_MK.shape
    _, (first, every) = shares(M, K, offset)
    return every > 1 and not _holds_something(x_MK[first::every]) and _holds_something(x_MK)


def _holds_something(x_MK: Tensor) -> bool:
    x = x_MK.detach().float()
    return bool(((x != 0) & x.isfinite()).any())


def _rows(x_MK: Tensor, start: int, height: int, offset: int | None, whole: bool) -> tuple[slice, slice, float]:
    """Of a run of rows: those that are sampled, those that are compared, and how many rows one of these stands for.

    `whole`: all are compared, whatever their share is.
    """
    M, K = x_MK.shape
    if x_MK.device.type != "cpu":
        (first, every), _ = shares(height, K, offset, cpu=False)
        return slice(first, None, every), slice(None), 1.0
    sampled, compared = shares(M, K, offset)
    compared = (0, 1) if whole else compared
    rows, errors = (slice((first - start) % every, None, every) for first, every in (sampled, compared))
    return rows, errors, M / len(range(compared[0], M, compared[1]))


def _runs(x_MK: Tensor, q: QTensor) -> Iterator[tuple[int, Tensor, QTensor]]:
    """The tensor and its codes in runs of whole granules' rows, each with its first."""
    M, K = x_MK.shape
    height = max(1, RUN[x_MK.device.type == "cpu"] // K)
    if isinstance(q.granularity, Block):
        height = -(-height // q.granularity.rows) * q.granularity.rows
    if height >= M:
        yield 0, x_MK, q
        return
    for start in range(0, M, height):
        rows = slice(start, start + height)
        if isinstance(q.granularity, PerTensor | PerColumn):
            scale = q.scale
        elif isinstance(q.granularity, Block):
            scale = q.scale[start // q.granularity.rows : -(-min(start + height, M) // q.granularity.rows)]
        else:
            scale = q.scale[rows]
        yield start, x_MK[rows], QTensor(q.codes[rows], scale, q.fmt, q.granularity)
