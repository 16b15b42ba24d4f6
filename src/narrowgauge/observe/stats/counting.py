"""Counting into fixed bins on any device, without reading anything back.

    |x| = 1.m * 2^(f - 127)            f = a float32's exponent field; 0: zeros and subnormals, 255: inf, NaN

A histogram over the 256 exponent fields costs one shift and one count; folding it into the stored bins happens once per
step, for all tensors together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.metrics.bins import (
    EXPONENT_BINS,
    EXPONENT_LOW,
    RANGE_BINS,
    SQNR_BINS,
    SQNR_LOW,
    SQNR_WIDTH,
)

FIELDS = 256
BIAS = 127


def count_bins(bins: Tensor, count: int) -> Tensor:
    """How often each of 0 ... count-1 occurs in an integer tensor, [count] float64."""
    flat = bins.reshape(-1)
    if flat.device.type == "cpu":
        return torch.bincount(flat, minlength=count).double()
    # bincount reads the maximum back on a GPU, which would stall it.
    out = torch.zeros(count, dtype=torch.float64, device=flat.device)
    return out.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.float64))


def count_fields(magnitude_bits: Tensor) -> Tensor:
    """Counts per exponent field of float32 magnitudes given as int32 bits, [256] float64."""
    return count_bins(magnitude_bits >> 23, FIELDS)


def fold_exponents(fields: Tensor, zeros: Tensor) -> Tensor:
    """[..., 256] counts per field, of which [...] are zeros -> [..., EXPONENT_BINS], laid out as in `metrics.bins`."""
    first = EXPONENT_LOW + BIAS  # the field of bin 1
    last = first + EXPONENT_BINS - 2
    below = fields[..., : first + 1].sum(-1) - zeros
    above = fields[..., last : FIELDS - 1].sum(-1)
    ends = (zeros[..., None], below[..., None], fields[..., first + 1 : last], above[..., None])
    return torch.cat(ends, -1)


def fold_ranges(fields: Tensor) -> Tensor:
    """[..., 256] counts per field of block amax / |x|, at least 1 -> [..., RANGE_BINS]; infinite ratios (zeros) go."""
    last = BIAS + RANGE_BINS - 1
    return torch.cat((fields[..., BIAS:last], fields[..., last : FIELDS - 1].sum(-1, keepdim=True)), -1)


def count_sqnr(signal: Tensor, error: Tensor, owner: Tensor, owners: int) -> Tensor:
    """Histograms of 10 log10(signal / error), one per owner.

    Args:
        signal, error: [R] sums of squares of rows (or columns), of any tensors.
        owner: [R] int64, whose row it is, below `owners`.

    Returns:
        [owners, SQNR_BINS] float64. A row without signal and error says nothing and is not counted.
    """
    decibel = 10 * torch.log10(signal / error)
    bins = torch.floor((decibel - SQNR_LOW) / SQNR_WIDTH).clamp_(-1, SQNR_BINS - 2) + 1
    place = owner * SQNR_BINS + torch.nan_to_num(bins).long()
    spare = owners * SQNR_BINS  # where rows without anything are put aside
    place = torch.where(decibel.isnan(), spare, place)
    return count_bins(place, spare + 1)[:spare].view(owners, SQNR_BINS)
