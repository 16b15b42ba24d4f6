"""The packed moments of one tensor: everything that the metrics need, as one vector on the tensor's device.

    moments(x, q) -> [width] float64, slots as in `metrics.MOMENTS`

Nothing is read back from a device. Large tensors are walked in runs of rows, which bounds the memory needed to a few
copies of one run; the runs merge by the law that merges microbatches.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from narrowgauge.compute.quant import Block, PerColumn, PerTensor, QTensor
from narrowgauge.errors import ShapeError
from narrowgauge.observe.stats.merging import empty
from narrowgauge.observe.stats.packing import Packer
from narrowgauge.observe.stats.tally import Tally, tally
from narrowgauge.observe.stats.whole import tally_whole

CPU, ELSEWHERE = True, False
RUN = {CPU: 1 << 19, ELSEWHERE: 1 << 24}  # elements looked at together; a GPU wants large launches
SAMPLE = {CPU: 1 << 12, ELSEWHERE: 1 << 18}  # elements that histograms and higher moments come from, at least
COLUMN_SAMPLE = {CPU: 1 << 15, ELSEWHERE: 1 << 62}  # elements that the sums along columns come from, at least


def moments(x: Tensor, q: QTensor, *, offset: int | None = None) -> Tensor:
    """Packed moments of a tensor and of its codes.

    Args:
        x: [..., K] of any float dtype; all leading dimensions are rows.
        q: its codes and scale, [M, K].
        offset: None looks at all rows; a number takes histograms, kurtosis and sums along columns from a share of
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


def tallies_of(x: Tensor, q: QTensor, offset: int | None) -> list[Tally]:
    """The tallies of all runs of rows of a tensor; none for an empty tensor. Arguments as for `moments`."""
    x_MK = x.detach().reshape(-1, x.shape[-1]) if x.numel() else x.new_zeros((0, x.shape[-1] if x.dim() else 0))
    if x_MK.numel() == 0:
        return []
    if tuple(x_MK.shape) != tuple(q.shape):
        raise ShapeError(
            f"the tensor is {list(x.shape)}, as rows {list(x_MK.shape)}, but its codes are {list(q.shape)};"
            " give the tensor that was quantized"
        )
    tallies = []
    for part, codes in _runs(x_MK, q):
        rows, columns = _share(part, SAMPLE, offset), _share(part, COLUMN_SAMPLE, offset)
        taken = tally_whole(part, codes, rows, columns) if part.device.type == "cpu" else None
        tallies.append(tally(part, codes, rows, columns) if taken is None else taken)
    return tallies


def _share(x_MK: Tensor, least: dict[bool, int], offset: int | None) -> slice:
    """Every so many rows of x, so that at least so many elements are among them; which rows turns with `offset`."""
    if offset is None:
        return slice(None)
    stride = max(1, min(len(x_MK), x_MK.numel() // least[x_MK.device.type == "cpu"]))
    return slice(offset % stride, None, stride)


def _runs(x_MK: Tensor, q: QTensor) -> Iterator[tuple[Tensor, QTensor]]:
    """The tensor and its codes in runs of whole granules' rows."""
    M, K = x_MK.shape
    height = max(1, RUN[x_MK.device.type == "cpu"] // K)
    if isinstance(q.granularity, Block):
        height = -(-height // q.granularity.rows) * q.granularity.rows
    if height >= M:
        yield x_MK, q
        return
    for start in range(0, M, height):
        rows = slice(start, start + height)
        if isinstance(q.granularity, PerTensor | PerColumn):
            scale = q.scale
        elif isinstance(q.granularity, Block):
            scale = q.scale[start // q.granularity.rows : -(-min(start + height, M) // q.granularity.rows)]
        else:
            scale = q.scale[rows]
        yield x_MK[rows], QTensor(q.codes[rows], scale, q.fmt, q.granularity)
