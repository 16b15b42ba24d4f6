"""The usual case on the CPU, fast: everything finite, numbers of a size whose squares float32 holds.

The same numbers as `tally`, from fewer passes:

    nothing is masked, because nothing has to be          no unit, because the squares fit
    saturation only where a granule's amax exceeds        lost energy only where a code is zero

On the CPU a number can be read without stalling anything, so all of that is found out on the way; a tensor that turns
out to be unusual is given back as None, for `tally`.

Passes write into scratch memory that a thread keeps: fresh buffers of this size come from the kernel page by page,
which costs as much as the arithmetic.

Legend: M = rows, K = columns.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from narrowgauge.compute.quant import PerTensor, QTensor, decode
from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.observe.stats.centering import Number, center
from narrowgauge.observe.stats.sample import sample
from narrowgauge.observe.stats.scales import scale_values, times
from narrowgauge.observe.stats.tally import INFINITY, MAGNITUDE, MARGIN, Tally

SMALLEST, LARGEST = 2.0**-10, 2.0**45  # of the largest number: float32 holds the squares of all that matter
_kept = threading.local()


def tally_whole(x_MK: Tensor, q: QTensor, *, stride: int = 1, offset: int = 0) -> Tally | None:
    """Count everything of a CPU tensor, as `tally` does; None if it is not whole. Arguments as for `tally`."""
    a_MK, b_MK, c_MK = _scratch(x_MK)
    x = x_MK.detach()
    if x.dtype != torch.float32:
        x = a_MK.copy_(x)
    elif not x.is_contiguous():
        x = x.contiguous()
    bits = torch.bitwise_and(x.view(torch.int32), MAGNITUDE, out=c_MK.view(torch.int32))
    low_bits, high_bits = torch.aminmax(bits)
    if int(high_bits) >= INFINITY:
        return None
    amax, amin = float(high_bits.view(torch.float32)), float(low_bits.view(torch.float32))
    has_zeros = amin == 0
    values: dict[str, Number] = {"numel": float(x.numel()), **scale_values(q.scale)}
    largest = max(amax, float(values["scale_max"]) * q.fmt.max)
    if values["scale_n"] != q.scale.numel() or not SMALLEST <= largest <= LARGEST:
        return None
    taken = sample(x, bits, stride, offset)
    values.update(taken.values)
    if has_zeros:
        # One less, and a zero's bits are the largest there are.
        smallest = int(bits.sub_(1).bitwise_and_(MAGNITUDE).amin()) + 1
        amin = float(torch.tensor(min(smallest, INFINITY), dtype=torch.int32).view(torch.float32))
    values.update(amax=amax, amin=amin, saturated=_saturated(x, q, amax))

    square = torch.mul(x, x, out=b_MK)
    row_signal = square.sum(1)
    values["mean"], values["m2"] = center(x, row_signal)
    d = decode(q.codes.contiguous(), torch.float32)
    values["flushed"], values["flushed_xx"] = _flushed(q, d, x, square, c_MK, has_zeros)
    times(d, q.scale, q.granularity)
    dd = float(torch.dot(d.view(-1), d.view(-1)))
    if not math.isfinite(dd):
        return None
    values["dd"], values["xd"] = dd, float(torch.dot(x.view(-1), d.view(-1)))
    error = torch.sub(x, d, out=d)
    error.mul_(error)
    row_error = error.sum(1)
    xx, ee = (float(rows.sum(dtype=torch.float64)) for rows in (row_signal, row_error))
    values.update(xx=xx, ee=ee, scaled_xx=xx)
    values.update(dict.fromkeys(("n", "scaled", "compared"), float(x.numel())))
    return Tally(values, row_signal, row_error, square.sum(0).double(), error.sum(0).double(), taken)


def _scratch(x_MK: Tensor) -> tuple[Tensor, ...]:
    """Three float32 buffers in x's shape that this thread keeps for the next tensor."""
    size = x_MK.numel()
    kept: tuple[Tensor, ...] = getattr(_kept, "buffers", ())
    if not kept or kept[0].numel() < size:
        kept = _kept.buffers = tuple(torch.empty(size) for _ in range(3))
    return tuple(buffer[:size].view(x_MK.shape) for buffer in kept)


def _saturated(x: Tensor, q: QTensor, amax: float) -> float:
    """How many elements lie beyond the format's range under their scale."""
    limit = q.fmt.max * MARGIN
    # Rounding is monotone: where no granule's largest element exceeds the limit, no element does.
    amaxes = torch.tensor(amax) if isinstance(q.granularity, PerTensor) else q.granularity.amax(x)
    if not bool((amaxes * q.inv_scale > limit).any()):
        return 0.0
    return float(torch.count_nonzero(times(x.abs(), q.inv_scale, q.granularity) > limit))


def _flushed(q: QTensor, codes: Tensor, x: Tensor, square: Tensor, out: Tensor, has_zeros: bool) -> tuple[float, float]:
    """How many elements that are not zero have the code +-0, and the sum of their squares."""
    bytes_ = q.codes.view(torch.uint8)
    # +0 and -0 are two codes that differ in the sign bit; the twins for AMD have one zero only.
    magnitudes = bytes_ & 0x7F if q.fmt in (E4M3FN, E5M2) else bytes_
    count = x.numel() - int(torch.count_nonzero(magnitudes))
    if count == 0:
        return 0.0, 0.0
    zero_codes = torch.eq(codes, 0.0, out=out)
    lost = float(torch.dot(zero_codes.view(-1), square.view(-1)))
    if has_zeros:
        count = int(torch.count_nonzero(zero_codes.mul_(x)))
    return float(count), lost
