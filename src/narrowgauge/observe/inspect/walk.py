"""One tensor, walked in runs of rows: memory holds one run, and the sums of all of them are exact.

    run -> quantize by the recipe's rule -> count -> merge by law (see metrics.merge) -> metrics

Nothing is sampled but that the histograms and the higher moments, which are the tensor's own, are counted for one
recipe and not again for the others. A scale per tensor needs the amax of all runs first.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.quant import Block, PerColumn, PerTensor, QTensor, quantize
from narrowgauge.compute.recipes import Operand
from narrowgauge.formats import E4M3FN
from narrowgauge.metrics import OPERAND_COLUMNS, finalize
from narrowgauge.observe.stats import host
from narrowgauge.observe.stats.packing import Packer
from narrowgauge.observe.stats.tally import tally

RUN = 1 << 20  # elements looked at together, at least the rows of one granule
TALL = 128  # rows of the tallest block of any recipe
Numbers = dict[str, Any]

# What a tensor is before anything quantizes it; the rest says what became of it.
OWN = (
    *("numel", "amax", "amin", "mean", "std", "l2", "nan_count", "inf_count", "kurtosis"),
    *("exponent_histogram", "block_range_histogram"),
)
BECAME = tuple(name for name in OPERAND_COLUMNS if name not in (*OWN, "amax_ratio"))
SCALES = ("scale_min", "scale_max", "scale_std")


def what_if(x: Tensor, operands: Mapping[str, Operand]) -> tuple[Numbers, dict[str, Numbers]]:
    """A tensor's own metrics, and what each rule would make of it.

    Args:
        x: [..., K] of float64, float32, float16 or bfloat16, at least two dimensions, not empty.
        operands: name -> rule, at least one.

    Returns:
        OWN columns, and by name the BECAME columns.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    runs = list(_runs(len(x_MK), x_MK.shape[1], TALL))
    first = next(iter(operands))

    def one(name: str) -> Numbers:
        rule = operands[name]
        given = _amax(x_MK, runs) if rule.granularity == PerTensor() else None

        def quantized(rows: slice) -> tuple[Tensor, QTensor]:
            x = x_MK[rows].contiguous()
            q = quantize(x, rule.fmt, rule.granularity, scaling=rule.scaling, margin=rule.margin, amax=given)
            return x, q

        return _metrics((quantized(rows) for rows in runs), whole=name == first)

    # One thread per recipe: threads inside of every small operation would wait for each other more than they work.
    workers = min(len(operands), torch.get_num_threads())
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = dict(zip(operands, pool.map(one, operands), strict=True))
    return _only(found[first], OWN), {name: _only(numbers, BECAME) for name, numbers in found.items()}


def plainly(x: Tensor) -> Numbers:
    """The OWN columns of a tensor that nothing quantizes; a vector is one row."""
    x_MK = x.reshape(-1, x.shape[-1] if x.dim() else 1)

    def beside_nothing(part: Tensor) -> tuple[Tensor, QTensor]:
        part = part.contiguous()
        # Counting needs codes; what is read of the result does not depend on them.
        codes = torch.zeros(part.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return part, QTensor(codes, torch.ones(()), E4M3FN, PerTensor())

    if len(x_MK) == 1:  # a long vector, cut across: RUN is a multiple of the blocks that ranges are taken over
        parts = x_MK.split(RUN, dim=1)
    else:
        parts = tuple(x_MK[rows] for rows in _runs(len(x_MK), x_MK.shape[1], 1))
    return _only(_metrics(map(beside_nothing, parts), whole=True), OWN)


def decoded(q: QTensor) -> tuple[Numbers, Numbers]:
    """What codes stand for: the OWN columns of codes · scale and those of the scale, then facts of the codes.

    Facts: `codes_used` of 256, and how many are `zeros`, at `max`, `nan` or `inf`.
    """
    counts = torch.zeros(256, dtype=torch.int64)

    def one(rows: slice) -> tuple[Tensor, QTensor]:
        part = QTensor(q.codes[rows].contiguous(), _scale_of(q, rows), q.fmt, q.granularity)
        counts.add_(torch.bincount(part.codes.view(torch.uint8).reshape(-1), minlength=256))
        return part.dequantize(), part

    tall = q.granularity.rows if isinstance(q.granularity, Block) else 1
    found = _metrics((one(rows) for rows in _runs(*q.shape, tall)), whole=True)
    values = torch.arange(256, dtype=torch.uint8).view(q.codes.dtype).float()
    kinds = {"zeros": values == 0, "max": values.abs() == q.fmt.max, "nan": values.isnan(), "inf": values.isinf()}
    facts = {"codes_used": int((counts > 0).sum())} | {name: int(counts[kind].sum()) for name, kind in kinds.items()}
    return _only(found, (*OWN, *SCALES)), facts


def _scale_of(q: QTensor, rows: slice) -> Tensor:
    """The scales of a run of rows, which begins where a granule does."""
    match q.granularity:
        case PerTensor() | PerColumn():
            return q.scale
        case Block(tall, _):
            return q.scale[rows.start // tall : -(-rows.stop // tall)]
    return q.scale[rows]


def _runs(M: int, K: int, tall: int) -> Iterator[slice]:
    """Runs of rows of about RUN elements, each of whole blocks `tall` rows high."""
    height = max(1, RUN // K // tall) * tall
    yield from (slice(start, min(start + height, M)) for start in range(0, M, height))


def _amax(x_MK: Tensor, runs: list[slice]) -> Tensor:
    amax = torch.zeros(())
    for rows in runs:
        amax = torch.maximum(amax, PerTensor().amax(x_MK[rows]))  # a NaN stays
    return amax


def _metrics(parts: Iterator[tuple[Tensor, QTensor]], whole: bool) -> Numbers:
    """Every metric of a tensor given in parts; histograms and kurtosis only from the `whole`."""
    packer = Packer()
    for x, q in parts:
        packer.add("", [_count(x, q, whole)])
    return {name: column[0].tolist() for name, column in finalize(packer.pack()[1].numpy()).items()}


def _count(x: Tensor, q: QTensor, whole: bool) -> Any:
    counted = host.count(x, q, (0, 1 if whole else len(x)), (0, 1)) if host.wait() else None
    return tally(x, q) if counted is None else counted  # what holds a NaN or an Inf is counted by passes


def _only(numbers: Numbers, names: tuple[str, ...]) -> Numbers:
    return {name: numbers[name] for name in names}
