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
from narrowgauge.observe.stats.scratch import scratch
from narrowgauge.observe.stats.tally import ALL, INFINITY, MAGNITUDE, MARGIN, Tally

SMALLEST, LARGEST = 2.0**-10, 2.0**45  # of the largest number: float32 holds the squares of all that matter
NOT_FINITE = {E4M3FN: 0x7F, E5M2: 0x7C}  # the smallest byte, its sign bit cleared, that is Inf or NaN
FEW = 1 / 8  # share of the rows below which flushed elements are looked for in their rows alone


def tally_whole(x_MK: Tensor, q: QTensor, rows: slice = ALL, columns: slice = ALL) -> Tally | None:
    """Count everything of a CPU tensor, as `tally` does; None if it is not whole. Arguments as for `tally`."""
    a_MK, b_MK, c_MK, half_MK = scratch(*x_MK.shape)
    x = x_MK.detach()
    if x.dtype != torch.float32:
        x = a_MK.copy_(x)
    elif not x.is_contiguous():
        x = x.contiguous()
    bits = torch.bitwise_and(x.view(torch.int32), MAGNITUDE, out=b_MK.view(torch.int32))
    low, high = (int(t) for t in torch.aminmax(bits))
    values = scale_values(q.scale)
    amax = _float(high)
    largest = max(amax, float(values["scale_max"]) * q.fmt.max)  # of x and of its codes' values
    if high >= INFINITY or values["scale_n"] != q.scale.numel() or amax < SMALLEST or largest > LARGEST:
        return None
    taken = sample(x[rows], bits[rows])
    has_zeros = low == 0
    if has_zeros:  # one less, and a zero's bits are the largest there are
        low = min(int(bits.sub_(1).bitwise_and_(MAGNITUDE).amin()) + 1, INFINITY)
    values.update(taken.values, amax=amax, amin=_float(low), saturated=_saturated(x, q, amax))

    codes = q.codes.contiguous()
    factor = _decode(codes, q, half_MK, out=b_MK)
    if factor is None:
        return None
    values["flushed"], values["flushed_xx"] = _flushed(codes, b_MK, x, has_zeros, q, c_MK)
    error, values["xd"], values["dd"] = _compared(x, b_MK, factor, q, out=c_MK)
    if not math.isfinite(float(values["dd"])):
        return None
    row_signal, row_error = (squared(torch.linalg.vector_norm(t, dim=1)) for t in (x, error))
    n, xx = float(x.numel()), float(row_signal.sum())
    mean = float(x.sum(1).numpy().sum(dtype=np.float64)) / n
    m2 = xx - n * mean**2
    if m2 <= ALIKE * xx:
        values["mean"], values["m2"] = center(x)
    else:
        values["mean"], values["m2"] = mean, m2
    values.update(numel=n, n=n, scaled=n, compared=n, scaled_xx=xx, xx=xx, ee=float(row_error.sum()))
    part = b_MK[: len(range(*columns.indices(len(x))))]
    col_signal, col_error = (torch.mul(t[columns], t[columns], out=part).sum(0) for t in (x, error))
    lines = (torch.from_numpy(row_signal), torch.from_numpy(row_error), col_signal, col_error)
    return Tally(values, *lines, taken)


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
        if np.float32(amax) * np.float32(q.inv_scale) <= limit:
            return 0.0
    elif not bool((q.granularity.amax(x) * q.inv_scale > limit).any()):
        return 0.0
    return float(torch.count_nonzero(times(x.abs(), q.inv_scale, q.granularity) > limit))


def _decode(codes: Tensor, q: QTensor, half: Tensor, out: Tensor) -> float | None:
    """The codes' values divided by a factor, in `out`; the factor, or None if a value is seen not to be finite.

    An E4M3 code's bits, one place down, are a half-precision number 256 times too small, and an E5M2 code is the
    upper byte of one (see compute.quant.decode). The factor goes with the scale instead of costing a pass.
    """
    if q.fmt not in NOT_FINITE:
        out.copy_(codes)  # torch's cast; a NaN shows in the sums
        return 1.0
    if int((codes.view(torch.uint8) & 0x7F).amax()) >= NOT_FINITE[q.fmt]:
        return None
    bits = half.view(torch.int16).copy_(codes.view(torch.int8))
    if q.fmt is E5M2:
        bits.mul_(1 << 8)
    else:
        bits.mul_(1 << 7).bitwise_and_(~0x4000)
    out.copy_(half)
    return 1.0 if q.fmt is E5M2 else 256.0


def _flushed(
    codes: Tensor, decoded: Tensor, x: Tensor, has_zeros: bool, q: QTensor, out: Tensor
) -> tuple[float, float]:
    """How many elements that are not zero have the code +-0, and the sum of their squares."""
    magnitudes = codes.view(torch.uint8)
    if q.fmt in NOT_FINITE:  # +0 and -0 are two codes; the twins for AMD have one zero
        magnitudes = magnitudes & 0x7F
    with_zeros = (magnitudes.amin(1) == 0).nonzero().view(-1)
    if not len(with_zeros):
        return 0.0, 0.0
    if len(with_zeros) <= FEW * len(x):
        x, decoded, out = x[with_zeros], decoded[with_zeros], out[: len(with_zeros)]
    zero = torch.eq(decoded, 0.0, out=out)
    count = float(zero.sum())  # whole numbers below 2^24: exact
    flushed = zero.mul_(x).view(-1)
    if count and has_zeros:
        count = float(torch.count_nonzero(flushed))
    return count, float(torch.dot(flushed, flushed))


def _compared(x: Tensor, codes: Tensor, factor: float, q: QTensor, out: Tensor) -> tuple[Tensor, float, float]:
    """The error x - d in `out`, and the sums of x d and d^2; `codes` is overwritten."""
    scale = 1.0
    if isinstance(q.granularity, PerTensor):
        scale = float(q.scale) * factor
    else:
        times(codes, q.scale * factor, q.granularity)
    flat = codes.view(-1)
    xd, dd = float(torch.dot(x.view(-1), flat)), float(torch.dot(flat, flat))
    return torch.sub(x, codes, alpha=scale, out=out), xd * scale, dd * scale**2
