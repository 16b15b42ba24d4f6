"""The packed moments of one tensor: everything that the metrics need, as one vector on the tensor's device.

    moments(x, q) -> [width] float64, slots as in `metrics.MOMENTS`

Nothing is read back from a device. Large tensors are walked in runs of rows, which bounds the memory needed to a few
copies of one run; the runs merge by the law that merges microbatches.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from narrowgauge.compute.quant import Block, PerColumn, PerTensor, QTensor
from narrowgauge.errors import ShapeError
from narrowgauge.observe.stats.merging import empty
from narrowgauge.observe.stats.packing import Packer
from narrowgauge.observe.stats.tally import Tally, tally
from narrowgauge.observe.stats.whole import tally_whole

RUN = {"cpu": 1 << 19}  # elements looked at at a time; more on a GPU, which wants large launches
RUN_ELSEWHERE = 1 << 26
SAMPLE = {"cpu": 1 << 13}  # elements that histograms are taken from, at least, if there are as many
SAMPLE_ELSEWHERE = 1 << 18


def moments(x: Tensor, q: QTensor, *, offset: int | None = None) -> Tensor:
    """Packed moments of a tensor and of its codes.

    Args:
        x: [..., K] of any float dtype; all leading dimensions are rows.
        q: its codes and scale, [M, K].
        offset: None takes the histograms from all rows; a number takes them from a share of the rows if the tensor is
            large, beginning with a row that turns with `offset`.

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
    stride = 1 if offset is None else _stride(x_MK.shape[0], x_MK.shape[1], x.device)
    tallies = []
    for part, codes in _runs(x_MK, q):
        step = min(stride, len(part))
        rows = {"stride": step, "offset": (offset or 0) % step}
        taken = tally_whole(part, codes, **rows) if part.device.type == "cpu" else None
        tallies.append(tally(part, codes, **rows) if taken is None else taken)
    return tallies


def _stride(M: int, K: int, device: torch.device) -> int:
    sample = SAMPLE.get(device.type, SAMPLE_ELSEWHERE)
    return max(1, min(M, M * K // sample))


def _runs(x_MK: Tensor, q: QTensor) -> Iterator[tuple[Tensor, QTensor]]:
    """The tensor and its codes in runs of whole granules' rows."""
    M, K = x_MK.shape
    height = max(1, RUN.get(x_MK.device.type, RUN_ELSEWHERE) // K)
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
