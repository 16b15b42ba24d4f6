"""One pass over an operand: everything the metrics need of x, its codes and its scale, left on the device.

    x_MK   the high-precision tensor        d_MK = codes * scale        e = x - d
    finite    x is finite                   x's own moments are over these
    scaled    finite, and its scale is too  flushed (x != 0, code +-0), saturated (|x| inv_scale > max (1 + 2^-20))
    compared  scaled, and d is finite       xx = sum x^2, xd = sum x d, dd = sum d^2, ee = sum e^2; also per row, column

Squares are taken on v = x * unit (see centering); sums run along rows in float32, over rows in float64.

On the CPU a number can be read without stalling anything, so passes that could only find nothing are skipped: masks
where everything is finite, saturation where no granule's amax exceeds the limit. On a device nothing is read back.

Histograms and the higher moments are taken from every `stride`-th row, beginning with `offset`; all else is exact.

Legend: M = rows (tokens or output features), K = columns (the contracted dimension).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.compute.quant import QTensor, decode
from narrowgauge.observe.stats.centering import Number, center, total, unit_of
from narrowgauge.observe.stats.sample import Sample, sample
from narrowgauge.observe.stats.scales import scale_values, times

MAGNITUDE = (
    0x7FFFFFFF  # a float32's bits without the sign; as integers they are ordered as the magnitudes are
)
INFINITY = 0x7F800000
MARGIN = 1 + 2.0**-20  # amax * fl(448 / amax) exceeds 448 by an ulp in a fifth of all tensors


@dataclass(frozen=True)
class Tally:
    """What was counted of one tensor, on its device.

    Args:
        values: slot name of the packed moments -> number, in the tensor's own units; a missing slot is neutral.
        row_signal, row_error: [M] float32, sums of v^2 and of its error's square along rows: only their ratio counts.
        col_signal, col_error: [K] float64, sums of x^2 and e^2 along columns.
        sample: histograms of the sampled rows.
    """

    values: dict[str, Number]
    row_signal: Tensor
    row_error: Tensor
    col_signal: Tensor
    col_error: Tensor
    sample: Sample


def tally(x_MK: Tensor, q: QTensor, *, stride: int = 1, offset: int = 0) -> Tally:
    """Count everything of a tensor and of what became of it.

    Args:
        x_MK: [M, K] of any float dtype (rounded to float32), not empty.
        q: its codes and scale, of the same shape.
        stride, offset: histograms and the higher moments are taken from rows offset, offset + stride, ...
    """
    x = x_MK.detach().to(torch.float32).contiguous()
    codes = decode(q.codes.contiguous(), torch.float32)
    values: dict[str, Number] = {"numel": float(x.numel()), **scale_values(q.scale)}
    cpu = x.device.type == "cpu"
    masks = _masks(x, codes, q, cpu)
    if masks is None:
        for name in ("n", "scaled", "compared"):
            values[name] = values["numel"]
    else:
        x, codes = torch.where(masks.finite, x, 0.0), torch.where(masks.compared, codes, 0.0)
        values.update(masks.counts())
    bits = x.view(torch.int32) & MAGNITUDE
    low, high = torch.aminmax(bits)
    values["amax"] = high.view(torch.float32)
    values["amin"] = _smallest_nonzero(bits, low, cpu)
    values["saturated"] = _saturated(x, q, masks, cpu)
    taken = sample(x, bits, stride, offset, None if masks is None else masks.finite)
    values.update(taken.values)

    unit = unit_of(torch.maximum(high.view(torch.float32), torch.as_tensor(values["scale_max"]) * q.fmt.max))
    back: Number = 1.0 if unit is None else 1.0 / unit.double()
    v = x if unit is None else x * unit
    square = v * v
    energy = square.sum(1)
    mean, m2 = center(v, energy, None if masks is None else masks.finite)
    values["mean"], values["m2"] = mean * back, m2 * back**2

    zero_codes = torch.eq(codes, 0.0, out=torch.empty_like(codes))
    if masks is not None:
        zero_codes.masked_fill_(~masks.scaled, 0.0)
        values["scaled_xx"] = total(torch.where(masks.scaled, square, 0.0).sum(1)) * back**2
        # A code that is NaN was replaced by zero above; it did not flush anything.
        zero_codes.masked_fill_(masks.scaled & ~masks.compared, 0.0)
    values["flushed"], values["flushed_xx"] = _flushed(zero_codes, x, square, back, cpu, no_zeros=low)

    d = times(codes, q.scale if unit is None else q.scale * unit, q.granularity)
    if masks is not None:
        d, v = torch.where(masks.compared, d, 0.0), torch.where(masks.compared, v, 0.0)
        square = torch.where(masks.compared, square, 0.0)
    flat_v, flat_d = v.view(-1), d.view(-1)
    values["xd"] = torch.dot(flat_v, flat_d).double() * back**2
    values["dd"] = torch.dot(flat_d, flat_d).double() * back**2
    error = torch.sub(v, d, out=d)
    error.mul_(error)
    row_signal = energy if masks is None else square.sum(1)
    row_error = error.sum(1)
    values["xx"], values["ee"] = total(row_signal) * back**2, total(row_error) * back**2
    values.setdefault("scaled_xx", values["xx"])
    col_signal, col_error = square.sum(0).double() * back**2, error.sum(0).double() * back**2
    return Tally(values, row_signal, row_error, col_signal, col_error, taken)


@dataclass(frozen=True)
class _Masks:
    """Which elements count where, when not all do: bool [M, K] each."""

    finite: Tensor
    nan: Tensor
    scaled: Tensor
    compared: Tensor

    def counts(self) -> dict[str, Number]:
        """The slots that count elements."""
        inf = ~(self.finite | self.nan)
        named = {"n": self.finite, "nan_count": self.nan, "inf_count": inf}
        named |= {"scaled": self.scaled, "compared": self.compared}
        return {name: mask.sum().double() for name, mask in named.items()}


def _masks(x: Tensor, codes: Tensor, q: QTensor, cpu: bool) -> _Masks | None:
    """The masks, or None where everything is finite and that can be found out for free."""
    # A sum of finite float32 numbers may overflow: then the masks are built for nothing, which is no harm.
    if cpu and all(math.isfinite(float(t.sum())) for t in (x, codes, q.scale)):
        return None
    finite = x.isfinite()
    scaled = finite & times(torch.ones_like(x), q.scale, q.granularity).isfinite()
    return _Masks(finite, x.isnan(), scaled, scaled & codes.isfinite())


def _smallest_nonzero(bits: Tensor, low: Tensor, cpu: bool) -> Tensor:
    if cpu and int(low) > 0:
        return low.view(torch.float32)
    smallest = torch.where(bits == 0, INFINITY, bits).amin()
    return smallest.view(torch.float32)  # still infinite, the neutral value, if there is none


def _saturated(x: Tensor, q: QTensor, masks: _Masks | None, cpu: bool) -> Number:
    """How many elements lie beyond the format's range under their scale."""
    limit = q.fmt.max * MARGIN
    # Rounding is monotone: if no granule's largest element exceeds the limit, no element does.
    if cpu and masks is None and not bool((q.granularity.amax(x) * q.inv_scale > limit).any()):
        return 0.0
    beyond = times(x.abs(), q.inv_scale, q.granularity) > limit
    if masks is not None:
        beyond &= masks.scaled
    return beyond.sum().double()


def _flushed(
    zero_codes: Tensor, x: Tensor, square: Tensor, back: Number, cpu: bool, no_zeros: Tensor
) -> tuple[Number, Number]:
    """How many elements that were not zero have the code +-0, and the sum of their squares; zero_codes is 0 or 1."""
    count = total(zero_codes.sum(1))
    if cpu and int(count) == 0:
        return 0.0, 0.0
    if not (cpu and int(no_zeros) > 0):
        count = total((zero_codes.bool() & (x != 0)).sum(1))
    return count, total((zero_codes * square).sum(1)) * back**2
