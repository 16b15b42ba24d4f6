"""`quantize_both` and `amax` through the kernels: the same arguments, the same codes and scales, bit for bit.

    one scale per tensor     amax (unless known), then one cast for both layouts; a given scale: amax and cast in one
    1x128 tiles              one kernel: amaxes, scales and codes of both layouts
    128x128 squares          the same, one amax per tile
    rows                     amaxes of rows and columns, then one cast for both layouts

What no kernel here does (1x32 blocks, two different rules, float64) goes the reference's way, which is exact and slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.compute.kernels.both import Both, Given
from narrowgauge.compute.kernels.both import quantize_both as by_reference
from narrowgauge.compute.kernels.fused import amax as tensor_amax
from narrowgauge.compute.kernels.fused import blocks, rows, tensorwise
from narrowgauge.compute.kernels.fused.watched import blocks as watched_blocks
from narrowgauge.compute.kernels.fused.watched import rows as watched_rows
from narrowgauge.compute.kernels.fused.watched import tensorwise as watched_tensorwise
from narrowgauge.compute.kernels.fused.watched.looks import Look
from narrowgauge.compute.quant import BLOCK_1x128, BLOCK_128x128, Granularity, PerRow, PerTensor, QTensor
from narrowgauge.compute.recipes import Operand

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRANULARITIES = (PerTensor(), PerRow(), BLOCK_1x128, BLOCK_128x128)
PLAIN: tuple[Any, ...] = (tensorwise, blocks, rows)
WATCHED: tuple[Any, ...] = (watched_tensorwise, watched_blocks, watched_rows)


def amax(x_MK: Tensor, granularity: Granularity) -> Tensor:
    """The largest magnitudes of x's granules, as `granularity.amax` gives them."""
    if granularity == PerTensor() and x_MK.is_contiguous() and x_MK.dtype in DTYPES:
        return tensor_amax.amax(x_MK)
    return granularity.amax(x_MK)


def quantize_both(
    x_MK: Tensor,
    plain: Operand | None,
    turned: Operand | None,
    *,
    shared: bool,
    given: Given | None = None,
    amax: Tensor | None = None,
    look: Look | None = None,
) -> Both:
    """Quantize x_MK by one rule or two; everything as for the reference's `quantize_both`. Fills `look`, if given."""
    rule = plain or turned
    scale: Tensor | None
    scale_T: Tensor | None
    if rule is None or not _can(x_MK, rule, plain, turned):
        return by_reference(x_MK, plain, turned, shared=shared, given=given, amax=amax)
    wanted: dict[str, Any] = {"plain": plain is not None, "turned": turned is not None}
    if look is not None:
        wanted["look"] = look
    by_tensor, by_block, by_row = PLAIN if look is None else WATCHED
    if rule.granularity == PerTensor():
        if given:
            codes, codes_T, scale, amax = by_tensor.cast_given(
                x_MK, rule, given.scale, given.inv_scale, slot=given.slot, scratch=given.scratch, **wanted
            )
        else:
            if amax is None:
                amax = tensor_amax.amax(x_MK if x_MK.is_contiguous() else x_MK.contiguous())
            codes, codes_T, scale = by_tensor.cast(x_MK, rule, amax, **wanted)
        scale_T = scale
    elif rule.granularity == BLOCK_128x128:
        codes, codes_T, scale = by_block.cast_squares(x_MK, rule.fmt, rule.scaling, rule.margin, **wanted)
        scale_T = scale.t()
    elif rule.granularity == BLOCK_1x128:
        codes, scale, codes_T, scale_T = by_block.cast_tiles(x_MK, rule.fmt, rule.scaling, rule.margin, **wanted)
    else:
        codes, scale, codes_T, scale_T = by_row.cast_rows(x_MK, rule.fmt, rule.scaling, rule.margin, **wanted)
    return Both(_wrap(codes, scale, rule), _wrap(codes_T, scale_T, rule), amax)


def _can(x_MK: Tensor, rule: Operand, plain: Operand | None, turned: Operand | None) -> bool:
    same = plain is None or turned is None or plain == turned
    known = rule.granularity in GRANULARITIES and rule.scaling.e8m0 is None
    return same and known and x_MK.dtype in DTYPES and x_MK.numel() > 0


def _wrap(codes: Tensor | None, scale: Tensor | None, rule: Operand) -> QTensor | None:
    return None if codes is None or scale is None else QTensor.unchecked(codes, scale, rule.fmt, rule.granularity)
