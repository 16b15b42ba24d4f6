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

from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.quant import CURRENT, CURRENT_POW2, E8M0_UP, Block, PerTensor, Scaling
from narrowgauge.formats import E4M3FN, E5M2, Format
from narrowgauge.session.sites.part import Rule, operand

_READ = ("dtype", "force_pow_2_scales", "amax_epsilon", "block_len", "block_scaling_dim", "with_amax_reduction")
_LEAVES = ("Float8Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer")


class _Read(NamedTuple):
    """How a quantizer is read: the names of `_READ` that it had, all at once, and one by one those that it may get."""

    has: attrgetter[Any]
    lacks: tuple[str, ...]

    @classmethod
    def of(cls, quantizer: Any) -> _Read:
        """For what it has now."""
        lacks = tuple(name for name in _READ if not hasattr(quantizer, name))
        return cls(attrgetter("__class__", *[name for name in _READ if name not in lacks]), lacks)


class _Known(NamedTuple):
    """A quantizer's rule, for as long as what is read of it says the same. Finding it takes as long as counting."""

    quantizer: ref[Any]
    read: _Read
    facts: tuple[Any, ...]
    rule: Rule


_KNOWN: dict[int, _Known] = {}  # by the ids of quantizers


def rule_of(quantizer: Any, role: str, margin: int) -> Rule | str:
    """The rule of a quantizer, or why it has none; `margin` is its recipe's, for a delayed scale.

    A scale is read where it lies, when it is used: TransformerEngine writes the next one over it.
    """
    known = _KNOWN.get(id(quantizer))
    if known is not None and known.quantizer() is quantizer:
        try:
            if known.facts == _facts(quantizer, margin, known.read):
                return known.rule
        except AttributeError:  # of one that it has no more
            pass
    rule = _rule_of(quantizer, role, margin)
    if isinstance(rule, Rule) and type(quantizer).__name__ in _LEAVES:
        read = _Read.of(quantizer)
        facts = _facts(quantizer, margin, read)
        if rule.given is None or rule.given.inv_scale.data_ptr() == facts[0]:  # else it is a copy
            gone = partial(_forget, id(quantizer))
            _KNOWN[id(quantizer)] = _Known(ref(quantizer, gone), read, facts, rule)
    return rule


def _facts(quantizer: Any, margin: int, read: _Read) -> tuple[Any, ...]:
    """Where its scale lies (no other comes to lie there while a rule holds it), and all else that a rule says."""
    scale = getattr(quantizer, "scale", None)
    at = (0, None) if scale is None else (scale.data_ptr(), scale.dtype)
    return (*at, margin, read.has(quantizer), *[getattr(quantizer, name, None) for name in read.lacks])


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
