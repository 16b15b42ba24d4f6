"""One look at an operand: everything the metrics need of x, its codes and its scale, left on its device.

    x_MK   the high-precision tensor        d_MK = codes * scale        e = x - d
    finite    x is finite                   x's own moments are over these
    scaled    finite, and its scale is too  flushed (x != 0, code +-0), saturated (|x| inv_scale > max (1 + 2^-20))
    compared  scaled, and d is finite       xx = sum x^2, xd = sum x d, dd = sum d^2, ee = sum e^2

Squares are taken on v = x * unit (see centering); sums run along rows in float32, over rows in float64. The sums
of x^2 and e^2 are kept per row and per column too.

Nothing is read back, so this runs on any device and whatever the tensor holds. `host` is its faster twin on the CPU.

Histograms and the higher moments are taken from a share of the rows, and so may be what compares x with d, flushed_xx
and scaled_xx; these sums are then scaled up to all rows. All else is exact.

Legend: M = rows (tokens or output features), K = columns (the contracted dimension).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.compute.quant import QTensor, decode
from narrowgauge.observe.stats.centering import Number, center, total, unit_of
from narrowgauge.observe.stats.sample import Sample, sample
from narrowgauge.observe.stats.scales import scale_values, times

ALL = slice(None)
MAGNITUDE = 0x7FFFFFFF  # a float32's bits without the sign; as integers they are ordered as the magnitudes are
INFINITY = 0x7F800000
MARGIN = 1 + 2.0**-20  # amax * fl(448 / amax) exceeds 448 by an ulp in a fifth of all tensors


@dataclass(frozen=True)
class Tally:
    """What was counted of one tensor, on its device.

    Args:
        values: slot name of the packed moments -> number, in the tensor's own units; a missing slot is neutral.
        row_signal, row_error: [R] sums of v^2 and of its error's square along compared rows; only their ratio counts.
        col_signal, col_error: [K] sums of x^2 and e^2 along columns.
        sample: what was taken from the sampled rows.
    """

    values: dict[str, Number]
    row_signal: Tensor
    row_error: Tensor
    col_signal: Tensor
    col_error: Tensor
    sample: Sample

    def note(self, slot: str, value: Tensor) -> None:
        """Fill a slot that nothing here knows of."""
        self.values[slot] = value


def tally(x_MK: Tensor, q: QTensor, rows: slice = ALL, errors: slice = ALL, share: float = 1.0) -> Tally:
    """Count everything of a tensor and of what became of it.

    Args:
        x_MK: [M, K] of any float dtype (rounded to float32), not empty.
        q: its codes and scale, of the same shape.
        rows: where histograms and the higher moments are taken from.
        errors: the rows that are compared with their codes.
        share: how many rows one of these stands for.
    """
    x = x_MK.detach().to(torch.float32).contiguous()
    codes = decode(q.codes.contiguous(), torch.float32)
    finite = x.isfinite()
    x = torch.where(finite, x, 0.0)
    scaled = finite & times(torch.ones_like(x), q.scale, q.granularity).isfinite()
    flushed = (codes == 0) & (x != 0) & scaled
    d = times(codes, q.scale, q.granularity)
    compared = scaled & d.isfinite()  # next to float32's largest number, a finite code may stand for more than that
    d = torch.where(compared, d, 0.0)
    values: dict[str, Number] = {"numel": float(x.numel()), **scale_values(q.scale)}
    nan = x_MK.detach().isnan()
    masks = {"n": finite, "nan_count": nan, "inf_count": ~(finite | nan), "scaled": scaled, "compared": compared}
    values.update({name: mask.sum().double() for name, mask in masks.items()})

    bits = x.view(torch.int32) & MAGNITUDE
    amax = bits.amax().view(torch.float32)
    values["amax"] = torch.where(finite.any(), amax, -torch.inf)
    # Still infinite, the neutral value, where everything is zero.
    values["amin"] = torch.where(bits == 0, INFINITY, bits).amin().view(torch.float32)
    beyond = times(x.abs(), q.inv_scale, q.granularity) > q.fmt.max * MARGIN
    values["saturated"] = (beyond & scaled).sum().double()
    taken = sample(x[rows], bits[rows], finite[rows])
    values.update(taken.values)

    # A scale from elsewhere may make d far larger than x, and its square must fit as well.
    unit = unit_of(torch.maximum(amax, d.abs().amax()))
    back = 1.0 / unit.double()
    v = x * unit
    square = v * v
    mean, m2 = center(v, finite)
    values["mean"], values["m2"] = mean * back, m2 * back**2
    values["flushed"] = flushed.sum().double()
    # From here on the rows that are compared.
    v, square, flushed, scaled, compared = (t[errors] for t in (v, square, flushed, scaled, compared))
    d = d[errors] * unit
    larger = back**2 * share
    values["flushed_xx"] = total(torch.where(flushed, square, 0.0).sum(1)) * larger
    values["scaled_xx"] = total(torch.where(scaled, square, 0.0).sum(1)) * larger

    v, square = torch.where(compared, v, 0.0), torch.where(compared, square, 0.0)
    values["xd"] = total((v * d).sum(1)) * larger
    values["dd"] = total((d * d).sum(1)) * larger
    error = torch.sub(v, d, out=d).square_()
    row_signal, row_error = square.sum(1), error.sum(1)
    values["xx"], values["ee"] = total(row_signal) * larger, total(row_error) * larger
    col_signal, col_error = (s.sum(0).double() * back**2 for s in (square, error))
    return Tally(values, row_signal, row_error, col_signal, col_error, taken)
