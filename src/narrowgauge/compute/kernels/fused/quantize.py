"""`quantize_both` and `amax` through the kernels: the same arguments, the same codes and scales, bit for bit.

    one scale per tensor     amax (unless known), then one cast for both layouts; a given scale: amax and cast in one
    1x128 tiles              one kernel: amaxes, scales and codes of both layouts
    128x128 squares          the same, one amax per tile
    rows                     amaxes of rows and columns, then one cast for both layouts

What no kernel here does (1x32 blocks, two different rules, float64) goes the reference's way, which is exact and slow.

A training step quantizes the same shapes again and again, so a cast is prepared once for all tensors that lie in memory
alike. Kernels run on the current device: a tensor elsewhere (a model spread over GPUs) makes its own the current one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from narrowgauge.compute.kernels.both import Both, Given
from narrowgauge.compute.kernels.both import quantize_both as by_reference
from narrowgauge.compute.kernels.fused import amax as tensor_amax
from narrowgauge.compute.kernels.fused.blocks import SquareCast, TileCast
from narrowgauge.compute.kernels.fused.launch import Again, Launch
from narrowgauge.compute.kernels.fused.rows import RowCast
from narrowgauge.compute.kernels.fused.tensorwise import Cast, CastGiven
from narrowgauge.compute.kernels.fused.watched.blocks import WatchedSquares, WatchedTiles
from narrowgauge.compute.kernels.fused.watched.looks import Look
from narrowgauge.compute.kernels.fused.watched.plan import Plan
from narrowgauge.compute.kernels.fused.watched.rows import watched_rows
from narrowgauge.compute.kernels.fused.watched.tensorwise import WatchedCast, WatchedGiven
from narrowgauge.compute.quant import BLOCK_1x128, BLOCK_128x128, Granularity, PerRow, PerTensor, QTensor
from narrowgauge.compute.recipes import Operand

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST = 8192  # casts remembered
NO_KERNEL, GIVEN, TENSOR, ROWS, TILES, SQUARES = range(6)
_KINDS = {PerTensor(): TENSOR, PerRow(): ROWS, BLOCK_1x128: TILES, BLOCK_128x128: SQUARES}
_CASTS: dict[int, Any] = {GIVEN: CastGiven, TENSOR: Cast, ROWS: RowCast, TILES: TileCast, SQUARES: SquareCast}
_WATCHED: dict[int, Any] = {
    GIVEN: WatchedGiven, TENSOR: WatchedCast, ROWS: watched_rows, TILES: WatchedTiles, SQUARES: WatchedSquares
}  # fmt: skip


class _Prepared(NamedTuple):
    """How to quantize tensors that lie in memory alike; `kept` is what nothing else may get the id of.

    `largest` is what finds the amax of what is only counted, if that takes a launch of its own.
    """

    kind: int
    cast: Any
    rule: Operand
    kept: Any
    largest: Launch | None = None


_PREPARED: dict[Hashable, _Prepared] = {}


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
    if x_MK.is_neg():  # what lies in memory is the opposite of its numbers
        x_MK = x_MK.resolve_neg()
    slot, plan = None if given is None else given.slot is not None, None if look is None else look.plan
    key = (x_MK.shape, x_MK.stride(), x_MK.dtype, x_MK.data_ptr() & 15, id(plain), id(turned), slot, id(plan))
    known = _PREPARED.get(key)
    if known is None:
        rule = plain or turned
        assert rule is not None  # somebody asked
        wanted = plain is not None, turned is not None
        known = _remember(key, _prepare(x_MK, rule, (plain, turned), wanted, slot, plan))
    kind, cast, rule, _, _ = known
    looks = () if look is None else (look,)
    scale: Tensor | None
    scale_T: Tensor | None
    if kind == NO_KERNEL:
        return by_reference(x_MK, plain, turned, shared=shared, given=given, amax=amax)
    if kind == TENSOR:
        if amax is None:
            amax = tensor_amax.amax(_whole(x_MK))
        codes, codes_T, scale = cast(x_MK, *looks, amax)
        scale_T = scale
    elif kind == GIVEN:
        assert given is not None  # or it would be of another kind
        codes, codes_T, scale, amax = cast(x_MK, *looks, given.scale, given.inv_scale, given.slot, given.scratch)
        scale_T = scale
    elif kind == SQUARES:
        codes, codes_T, scale = cast(x_MK, *looks)
        scale_T = scale.t()
    else:
        codes, scale, codes_T, scale_T = cast(x_MK, *looks)
    return Both(_wrap(codes, scale, rule), _wrap(codes_T, scale_T, rule), amax)


def count(x_MK: Tensor, rule: Operand, look: Look, given: Given | None = None) -> None:
    """Fill `look` with what `rule` would make of x_MK, and make nothing; a given scale's slot is left alone.

    A look that was filled twice by the same rule and scale, from tensors that lay as x_MK does, is filled by the same
    launches again.
    """
    if x_MK.is_neg():
        x_MK = x_MK.resolve_neg()
    place = x_MK.data_ptr()
    strides, offset = x_MK.stride(), place & 15
    same_scale = look.given is None if given is None else look.given is not None and look.given() is given
    as_before = same_scale and look.lies == (look.asked, strides) and look.offset == offset
    if as_before and look.again is not None:
        look.again(x_MK, place, look.numbers)
        return
    slot = None if given is None else False
    key = (x_MK.shape, strides, x_MK.dtype, offset, id(rule), slot, id(look.plan))
    known = _PREPARED.get(key)
    if known is None:
        known = _prepare(x_MK, rule, (rule, None), (False, False), slot, look.plan)
        if known.kind == TENSOR and x_MK.is_contiguous():
            known = known._replace(largest=tensor_amax.prepared(x_MK))
        _remember(key, known)
    if known.kind == GIVEN:
        assert given is not None  # or it would be of another kind
        known.cast(x_MK, look, given.stored, given.inv_scale, None, look.scratch)
    elif known.largest is not None:
        known.largest((x_MK, look.amax, look.scratch))
        known.cast(x_MK, look, look.amax)
    elif known.kind == TENSOR:
        known.cast(x_MK, look, tensor_amax.amax(_whole(x_MK), look.amax, look.scratch))
    else:
        known.cast(x_MK, look)
    look.again = _again(x_MK, look, given, known) if as_before else None
    look.lies, look.offset, look.given = (look.asked, strides), offset, None if given is None else ref(given)


def _again(x_MK: Tensor, look: Look, given: Given | None, known: _Prepared) -> Again | None:
    """The launches that just filled `look`, to be made again; None where they need more than x_MK and the look."""
    counts: Again | None
    if known.kind != TENSOR:
        counts = known.cast.again(x_MK, look, *(() if given is None else (given.stored, given.inv_scale)))
        return counts
    if known.largest is None:
        return None
    largest = known.largest.again((x_MK, look.amax, look.scratch))
    counts = known.cast.again(x_MK, look, look.amax)
    return None if largest is None or counts is None else largest.alone().then(counts)


@torch.no_grad()
def _copied(x_MK: Tensor) -> Tensor:
    return x_MK.t() if x_MK.t().is_contiguous() else x_MK.contiguous()


def _whole(x_MK: Tensor) -> Tensor:
    """The same numbers without gaps, in any order."""
    return x_MK if x_MK.is_contiguous() else _copied(x_MK)


def _prepare(
    x_MK: Tensor,
    rule: Operand,
    rules: tuple[Operand | None, Operand | None],
    wanted: tuple[bool, bool],
    slot: bool | None,
    plan: Plan | None,
) -> _Prepared:
    """How to cast what lies in memory as x_MK does.

    `wanted`: plain codes, turned codes. `slot`: None where the scale is x's own, else whether somebody is to hear of
    the amax. `plan`: a look's.
    """
    same = None in rules or rules[0] == rules[1]
    kind = _KINDS.get(rule.granularity, NO_KERNEL)
    if not same or rule.scaling.e8m0 is not None or x_MK.dtype not in DTYPES or not x_MK.numel():
        kind = NO_KERNEL
    if kind == NO_KERNEL:
        return _Prepared(NO_KERNEL, None, rule, (rules, plan))
    more: tuple[bool, ...] = ()
    if kind == TENSOR and slot is not None:
        kind, more = GIVEN, (slot,)
    made = (
        _CASTS[kind](x_MK, rule, *wanted, *more) if plan is None else _WATCHED[kind](x_MK, rule, plan, *wanted, *more)
    )
    return _Prepared(kind, made, rule, (rules, plan))


def _remember(key: Hashable, prepared: _Prepared) -> _Prepared:
    if len(_PREPARED) >= MOST:
        _PREPARED.clear()
    _PREPARED[key] = prepared
    return prepared


def _wrap(codes: Tensor | None, scale: Tensor | None, rule: Operand) -> QTensor | None:
    return None if codes is None or scale is None else QTensor.unchecked(codes, scale, rule.fmt, rule.granularity)
