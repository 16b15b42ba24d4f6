"""TransformerEngine's quantizers as rules of ours, read and never run: running one would write into its amax history.

    its class                       ours
    Float8Quantizer                 the scale that it holds: delayed, made from the amaxes of steps before
    Float8CurrentScalingQuantizer   CURRENT, per tensor; powers of two if it forces them
    Float8BlockQuantizer            CURRENT_POW2, 1x128 or 128x128
    MXFP8Quantizer                  E8M0_UP, 1x32, or 32x32
    HybridQuantizer                 that of its first product, or of the second where the first is not in FP8

Its `scale` multiplies towards FP8: our inv_scale. Delayed, the row says how far amaxes have run from their history:
amax_ratio = amax now / amax that the scale assumes. Above 1 the tensor saturates, where current scaling would not.

Source: TransformerEngine 2.20, transformer_engine/pytorch/tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, E8M0_UP, Block, PerTensor, Scaling
from narrowgauge.formats import E4M3FN, E5M2, Format
from narrowgauge.session.sites.part import Rule, operand

_SCALED = ("force_pow_2_scales", "amax_epsilon")
_READ = {  # what the rule of a quantizer is made of, beside its class and its scale
    "Float8Quantizer": ("with_amax_reduction", "dtype"),
    "Float8CurrentScalingQuantizer": ("with_amax_reduction", "dtype", *_SCALED),
    "Float8BlockQuantizer": ("with_amax_reduction", "dtype", *_SCALED, "block_len", "block_scaling_dim"),
}


class _Known(NamedTuple):
    """A quantizer's rule, for as long as what is read of it says the same. Finding it takes as long as counting.

    `read` asks at once for all that it had and `said`; what it `lacks` it may get. Its scale lies at `place`, if the
    rule has one: no other comes to lie there while the rule holds it.
    """

    quantizer: Callable[[], Any]
    read: attrgetter[Any]
    said: tuple[Any, ...]
    lacks: tuple[str, ...]
    margin: int
    place: int
    rule: Rule

    @classmethod
    def of(cls, quantizer: Any, margin: int, rule: Rule) -> _Known | None:
        """None where it can be known no other time."""
        names = _READ.get(type(quantizer).__name__)
        place = 0 if rule.given is None else rule.given.inv_scale.data_ptr()
        if names is None or (place and not _lies_at(place, quantizer.scale)):  # else it is a copy
            return None
        lacks = tuple(name for name in names if not hasattr(quantizer, name))
        read = attrgetter("__class__", *[name for name in names if name not in lacks])
        gone = partial(_forget, id(quantizer))
        return cls(ref(quantizer, gone), read, read(quantizer), lacks, margin, place, rule)


_KNOWN: dict[int, _Known] = {}  # by the ids of quantizers


def rule_of(quantizer: Any, role: str, margin: int) -> Rule | str:
    """The rule of a quantizer, or why it has none; `margin` is its recipe's, for a delayed scale.

    A scale is read where it lies, when it is used: TransformerEngine writes the next one over it.
    """
    known = _KNOWN.get(id(quantizer))
    if known is not None and _says_the_same(known, quantizer, margin):
        return known.rule
    rule = _rule_of(quantizer, role, margin)
    if isinstance(rule, Rule) and (made := _Known.of(quantizer, margin, rule)) is not None:
        _KNOWN[id(quantizer)] = made
    return rule


def _says_the_same(known: _Known, quantizer: Any, margin: int) -> bool:
    of, read, said, lacks, by_margin, place, _ = known
    if of() is not quantizer or margin != by_margin:  # another may have its id by now
        return False
    try:
        if read(quantizer) != said:
            return False
        for name in lacks:
            if getattr(quantizer, name, None) is not None:
                return False
        return not place or _lies_at(place, quantizer.scale)
    except AttributeError:  # of one that it has no more
        return False


def _lies_at(place: int, scale: Tensor) -> bool:
    return scale.data_ptr() == place and scale.dtype is torch.float32


def _forget(quantizer: int, gone: Any) -> None:
    if (known := _KNOWN.get(quantizer)) is not None and known.quantizer is gone:  # another may have its id by now
        del _KNOWN[quantizer]


def _rule_of(quantizer: Any, role: str, margin: int) -> Rule | str:
    kind = type(quantizer).__name__
    if hasattr(quantizer, "rowwise_quantizer"):
        return _of_two(quantizer.rowwise_quantizer, quantizer.columnwise_quantizer, role, margin)
    if hasattr(quantizer, "of"):  # [[high]] has its codes multiplied in high precision
        return rule_of(quantizer.of, role, margin)
    if _is_high(quantizer):
        return left_high(role)
    if getattr(quantizer, "with_amax_reduction", False):
        return "TransformerEngine's scales that are reduced over ranks within a step are not known here; not recorded."
    fmt = _format(quantizer.dtype)
    if kind == "Float8Quantizer":
        return Rule(operand(fmt, PerTensor(), CURRENT, margin), Given(None, quantizer.scale.detach().view(()).float()))
    if kind == "Float8CurrentScalingQuantizer":
        return Rule(operand(fmt, PerTensor(), _scaling(quantizer)))
    if kind == "Float8BlockQuantizer":
        side = quantizer.block_len if quantizer.block_scaling_dim == 2 else 1
        return Rule(operand(fmt, Block(side, quantizer.block_len), _scaling(quantizer)))
    if kind == "MXFP8Quantizer":
        side = 32 if getattr(quantizer, "with_2d_quantization", False) else 1
        return Rule(operand(fmt, Block(side, 32), E8M0_UP))
    return f"TransformerEngine quantizes the {role} of some layers by a {kind}, which is not known here; not recorded."


def left_high(role: str) -> str:
    """Why an operand has no row."""
    return f"TransformerEngine leaves the {role} of some layers in high precision; it is not recorded."


def _of_two(by_rows: Any, by_columns: Any, role: str, margin: int) -> Rule | str:
    if not _is_high(by_rows):
        return rule_of(by_rows, role, margin)
    if not _is_high(by_columns) and getattr(by_columns, "block_scaling_dim", 2) == 1:
        return f"TransformerEngine casts the {role} of some layers only for a second product, by column; not recorded."
    return rule_of(by_columns, role, margin)


def _is_high(quantizer: Any) -> bool:
    cls: Any = type(quantizer)
    return quantizer is None or (_leaves_it(cls) and not hasattr(quantizer, "of"))


@lru_cache(64)
def _leaves_it(cls: Any) -> bool:
    return any(kind.__name__ == "IdentityQuantizer" for kind in cls.__mro__)


@lru_cache(64)
def _format(dtype: Any) -> Format:
    """Of a member of TransformerEngine's enumeration, whose names take long to ask for."""
    return E5M2 if "E5M2" in getattr(dtype, "name", str(dtype)) else E4M3FN


def _scaling(quantizer: Any) -> Scaling:
    rule = CURRENT_POW2 if quantizer.force_pow_2_scales else CURRENT
    floor = float(getattr(quantizer, "amax_epsilon", 0.0) or 0.0)
    return replace(rule, amax_floor=floor) if floor else rule
