"""What a loss was computed of: another of the very same tensors, by another function, is a metric beside it.

    F.mse_loss(y, target); F.l1_loss(y, target)         one measure of an evaluation: the one that the program trains by
    F.mse_loss(y, target); F.cross_entropy(z, label)    two tasks

A program that trains by both has two tasks as well. Where it trains by neither, or nobody hears by what, the first
counts; of an evaluation before the training that is not known yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.session.tensors.storage import storage_of

GIVEN = 2  # arguments that say what is measured: what a model returned, and what was wanted; behind them come weights


class Measure(NamedTuple):
    """What a function returned; `summed` over the batch. Of what a model returned nobody knows the function."""

    function: str
    value: Tensor
    summed: bool


class _Part:
    """A tensor by where it lies, which nothing else does as long as it lives; nothing here holds its memory."""

    def __init__(self, x: Tensor) -> None:
        storage = storage_of(x)
        self._memory = None if storage is None else StorageWeakRef(storage)
        self._place = () if storage is None else (x.storage_offset(), x.shape, x.dtype)

    def is_of(self, other: _Part) -> bool:
        """Whether both are the same numbers, which are still there."""
        if self._memory is None or other._memory is None or self._memory.expired():
            return False
        return self._memory.cdata == other._memory.cdata and self._place == other._place


class Measured:
    """The latest loss of an evaluation that counts; `trained` are the functions that were called with gradients."""

    def __init__(self) -> None:
        self.trained: set[str] = set()
        self._name = ""
        self._parts: list[_Part] = []

    def again(self, name: str, arguments: Sequence[Any]) -> bool:
        """Whether a loss is another measure of what the latest was of, behind which no model was called."""
        parts = _parts(arguments)
        if name == self._name or {name, self._name} <= self.trained or not len(parts) == len(self._parts) > 0:
            return False
        return all(one.is_of(other) for one, other in zip(self._parts, parts, strict=True))

    def which(self, measures: Sequence[Measure]) -> Measure:
        """Which of these counts, that are of the same."""
        return next((measure for measure in measures if measure.function in self.trained), measures[0])

    def forget(self) -> None:
        """What was computed of nobody knows what is the latest."""
        self._name, self._parts = "", []

    def counts(self, name: str, arguments: Sequence[Any]) -> None:
        """This loss is the latest that counts."""
        self._name, self._parts = name, _parts(arguments)


def _parts(arguments: Sequence[Any]) -> list[_Part]:
    return [_Part(x) for x in arguments[:GIVEN] if isinstance(x, Tensor)]
