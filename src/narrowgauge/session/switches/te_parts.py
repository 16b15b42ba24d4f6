"""Quantizers of ours, derived from TransformerEngine's when they are first needed.

    Hybrid      two directions, each by a quantizer of its own
    Identity    the tensor as it is
    Codes       what a tensor's codes stand for

TransformerEngine's kernels for one scale per tensor make no transposed codes alone: there Hybrid's direction by columns
makes both. And where that is the only direction with a delayed scale, it is made in every call: the scale needs the
amax also of a forward that has no use for the codes, as a checkpoint's first, whose recomputation leaves no amax.

Source: TransformerEngine 2.20, transformer_engine/pytorch/tensor/hybrid_tensor.py and identity_tensor.py.
"""

from __future__ import annotations

import copy
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_DELAYED = "Float8Quantizer"
_WHOLE = (_DELAYED, "Float8CurrentScalingQuantizer")  # one scale per tensor
_TENSOR = "transformer_engine.pytorch.tensor"


class _Ours:
    """What stands in the place of a layer's own quantizer, `theirs`; a copy or a pickle of the layer has the own one.

    A tensor keeps a copy of the quantizer that made it. Those have no `theirs`, and become TransformerEngine's in a
    pickle.
    """

    theirs: Any = None
    plain: type  # of TransformerEngine's

    def _like(self, made: Any) -> Any:
        """A copy that TransformerEngine made, as one of ours: with all that it holds, in another class.

        Not by `made.__class__ = ...`: an ABC without a `__dict__` is at the bottom of theirs, so the layouts differ.
        """
        ours: Any = object.__new__(type(self))
        vars(ours).update(vars(made))
        return ours

    def __reduce__(self) -> Any:
        if self.theirs is not None:
            return copy.copy, (self.theirs,)
        return _plain, (self.plain, {name: value for name, value in vars(self).items() if name != "of"})


def _plain(kind: type, state: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update(state)
    return made


@cache
def parts() -> Any:
    """Ours, derived from TransformerEngine's; AttributeError or ImportError if it has none of these."""
    hybrid: Any = import_module(f"{_TENSOR}.hybrid_tensor").HybridQuantizer
    identity: Any = import_module(f"{_TENSOR}.identity_tensor").IdentityQuantizer

    class Hybrid(_Ours, hybrid):  # type: ignore[misc]
        plain = hybrid

        def pin(self) -> None:
            child = self.columnwise_quantizer
            if type(child).__name__ in _WHOLE:
                child.set_usage(rowwise=True, columnwise=True)

        def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
            alone = type(self.rowwise_quantizer) is Identity and type(self.columnwise_quantizer).__name__ == _DELAYED
            super().set_usage(rowwise=rowwise, columnwise=True if alone and columnwise is False else columnwise)

        def copy(self) -> Any:
            made = self._like(super().copy())
            made.pin()
            return made

    class Identity(_Ours, identity):  # type: ignore[misc]
        plain = identity

        def copy(self) -> Any:
            return self._like(super().copy())

    class Codes(_Ours, identity):  # type: ignore[misc]
        plain = identity
        of: Any

        def copy(self) -> Any:
            made = self._like(super().copy())
            made.of = self.of.copy()
            return made

        def quantize_impl(self, tensor: Tensor) -> Any:
            return super().quantize_impl(self._read(tensor))

        def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
            return super().update_quantized(self._read(src), dst, noop_flag=noop_flag)

        def _read(self, tensor: Tensor) -> Tensor:
            with torch.no_grad():
                read: Tensor = self.of.quantize(tensor.detach()).dequantize(dtype=self.dtype or tensor.dtype)
            return read

    return SimpleNamespace(base=identity, Hybrid=Hybrid, Identity=Identity, Codes=Codes)


def available() -> bool:
    """Whether this version of TransformerEngine has the parts."""
    try:
        return parts() is not None
    except (ImportError, AttributeError):
        return False
