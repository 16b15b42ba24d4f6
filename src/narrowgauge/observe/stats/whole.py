"""The usual case on the CPU, fast: everything finite, numbers of a size whose squares float32 holds.

The same numbers as `tally`, from fewer passes:

    nothing is masked, for nothing has to be          no unit, for the squares fit
    one scale: e = x - scale * c in one pass          rows: sum x^2 = norm(row)^2, one reduction
    saturation only where a granule's amax exceeds    lost energy only in the rows that hold a zero code

On the CPU a number can be read without stalling anything, so all of that is found out on the way; a tensor that
turns out to be unusual is given back as None, for `tally`.

Passes write into scratch memory that a thread keeps: fresh buffers of this size come from the kernel page by page,
which costs as much as the arithmetic.

Legend: M = rows, K = columns; c_MK = the codes' values, up to `factor`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.compute.quant import PerTensor, QTensor
from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.observe.stats.centering import ALIKE, center
from narrowgauge.observe.stats.sample import sample
from narrowgauge.observe.stats.scales import scale_values, times
from narrowgauge.observe.stats.scratch import Scratch, scratch
from narrowgauge.observe.stats.tally import ALL, INFINITY, MAGNITUDE, MARGIN, Tally

SMALLEST, LARGEST = 2.0**-10, 2.0**45  # of the largest number: float32 holds the squares of all that matter
NOT_FINITE = {E4M3FN: 0x7F, E5M2: 0x7C}  # the smallest byte, its sign bit cleared, that is Inf or NaN
NEAR = 1e-2  # share of sum x^2 that sum d^2 must exceed
FEW = 1 / 8  # share of the rows below which flushed elements are looked for in their rows alone


def tally_whole(x_MK: Tensor, q: QTensor, rows: slice = ALL, columns: slice = ALL) -> Tally | None:
    """Count everything of a CPU tensor, as `tally` does; None if it is not whole. Arguments as for `tally`."""
    free = scratch(x_MK.shape[0], x_MK.shape[1])
    x = x_MK.detach().contiguous()
    low, high, smallest = _extremes(x, free)
    if x.dtype != torch.float32:
        x = free.a.copy_(x)
    values = scale_values(q.scale)
    amax = _float(high)
    largest = max(amax, float(values["scale_max"]) * q.fmt.max)  # of x and of its codes' values
    if high >= INFINITY or values["scale_n"] != q.scale.numel() or amax < SMALLEST or largest > LARGEST:
        return None
    taken = sample(x[rows], x[rows].view(torch.int32) & MAGNITUDE)
    has_zeros = low == 0
    values.update(taken.values, amax=amax, amin=_float(smallest), saturated=_saturated(x, q, amax))

    codes = q.codes.contiguous().view(torch.uint8)
    magnitudes = codes
    if q.fmt in NOT_FINITE:  # the twins for AMD have one zero and one NaN only
        magnitudes = torch.bitwise_and(codes, 0x7F, out=free.byte)
    smallest_code, largest_code = (int(t) for t in torch.aminmax(magnitudes))
    if q.fmt in NOT_FINITE and largest_code >= NOT_FINITE[q.fmt]:
        return None
    factor = _decode(codes, q, free.half, out=free.b)
    values.update(flushed=0.0, flushed_xx=0.0)
    if smallest_code == 0:
        values["flushed"], values["flushed_xx"] = _flushed(magnitudes, x, has_zeros, free)
    error, scale, dd = _error(x, free.b, factor, q, out=free.c)
    if not math.isfinite(dd):
        return None
    row_signal, row_error = (squared(torch.linalg.vector_norm(t, dim=1)) for t in (x, error))
    n, xx, ee = float(x.numel()), float(row_signal.sum()), float(row_error.sum())
    if dd > NEAR * xx:  # from sum (x - d)^2 = xx - 2 xd + dd, which keeps its digits unless d is far smaller than x
        values["xd"] = (xx + dd - ee) / 2
    else:
        values["xd"] = float(torch.dot(x.view(-1), free.b.view(-1))) * scale
    mean = float(x.sum(1).numpy().sum(dtype=np.float64)) / n
    m2 = xx - n * mean**2
    values["mean"], values["m2"] = (mean, m2) if m2 > ALIKE * xx else center(x)
    values.update(numel=n, n=n, scaled=n, compared=n, scaled_xx=xx, xx=xx, ee=ee, dd=dd)
    part = free.b[: len(range(*columns.indices(len(x))))]
    col_signal, col_error = (torch.mul(t[columns], t[columns], out=part).sum(0) for t in (x, error))
    lines = (torch.from_numpy(row_signal), torch.from_numpy(row_error), col_signal, col_error)
    return Tally(values, *lines, taken)


def _extremes(x: Tensor, free: Scratch) -> tuple[int, int, int]:
    """The smallest, the largest and the smallest nonzero magnitude of x, as float32 bits; INFINITY if all are zero.

    A float's bits without the sign are ordered as the magnitudes are, and bfloat16 is the upper half of float32.
    """
    if x.dtype == torch.bfloat16:
        bits = torch.bitwise_and(x.view(torch.int16), MAGNITUDE >> 16, out=free.half.view(torch.int16))
        shift = 16
    else:
        x = x if x.dtype == torch.float32 else free.a.copy_(x)
        bits = torch.bitwise_and(x.view(torch.int32), MAGNITUDE, out=free.b.view(torch.int32))
        shift = 0
    low, high = (int(t) << shift for t in torch.aminmax(bits))
    smallest = low
    if low == 0:  # one less, and a zero's bits are the largest there are
        smallest = min(int(bits.sub_(1).bitwise_and_(MAGNITUDE >> shift).amin()) + 1 << shift, INFINITY)
    return low, high, smallest


def _float(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))


def squared(norms: Tensor) -> npt.NDArray[np.float64]:
    """The squares of norms [M], in float64."""
    wide = norms.numpy().astype(np.float64)
    return np.multiply(wide, wide, out=wide)


def _saturated(x: Tensor, q: QTensor, amax: float) -> float:
    """How many elements lie beyond the format's range under their scale."""
    limit = q.fmt.max * MARGIN
    # Rounding is monotone: where no granule's largest element exceeds the limit, no element does.
    if isinstance(q.granularity, PerTensor):
        # Its reciprocal overflows where the scale is subnormal; such a tensor goes the long way.
        with np.errstate(over="ignore"):
            if np.float32(amax) * (np.float32(1) / np.float32(q.scale)) <= limit:
                return 0.0
    elif not bool((q.granularity.amax(x) * q.inv_scale > limit).any()):
        return 0.0
    return float(torch.count_nonzero(times(x.abs(), q.inv_scale, q.granularity) > limit))


def _decode(codes: Tensor, q: QTensor, half: Tensor, out: Tensor) -> float:
    """The codes' values divided by a factor, in `out`; returns the factor.

    An E4M3 code's bits, one place down, are a half-precision number 256 times too small, and an E5M2 code is the
    upper byte of one (see compute.quant.decode). The factor goes with the scale instead of costing a pass.
    """
    if q.fmt not in NOT_FINITE:
        out.copy_(q.codes)  # torch's cast; a NaN shows in the sums
        return 1.0
    bits = half.view(torch.int16).copy_(codes.view(torch.int8))
    if q.fmt is E5M2:
        bits.mul_(1 << 8)
    else:
        bits.mul_(1 << 7).bitwise_and_(~0x4000)
    out.copy_(half)
    return 1.0 if q.fmt is E5M2 else 256.0


def _flushed(magnitudes: Tensor, x: Tensor, has_zeros: bool, free: Scratch) -> tuple[float, float]:
    """How many elements that are not zero have the code +-0, and the sum of their squares. free.b: the codes."""
    with_zeros = np.flatnonzero(magnitudes.amin(1).numpy() == 0)
    decoded, out = free.b, free.c
    if len(with_zeros) <= FEW * len(x):
        index = torch.from_numpy(with_zeros)
        x, decoded, out = x[index], decoded[index], out[: len(index)]
    zero = torch.eq(decoded, 0.0, out=out)
    count = float(zero.sum())  # whole numbers below 2^24: exact
    flushed = zero.mul_(x).view(-1)
    if has_zeros:
        count = float(torch.count_nonzero(flushed))
    return count, float(torch.dot(flushed, flushed))


def _error(x: Tensor, codes: Tensor, factor: float, q: QTensor, out: Tensor) -> tuple[Tensor, float, float]:
    """The error x - d in `out`, the scale with which `codes` now are d, and the sum of d^2."""
    scale = 1.0
    if isinstance(q.granularity, PerTensor):
        scale = float(q.scale) * factor
    else:
        times(codes, q.scale * factor, q.granularity)
    flat = codes.view(-1)
    dd = float(torch.dot(flat, flat)) * scale**2
    return torch.sub(x, codes, alpha=scale, out=out), scale, dd
