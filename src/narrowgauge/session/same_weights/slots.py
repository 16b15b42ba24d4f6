"""The values of a tape: what a replay computes anew. Each has a slot, by the identity of the script's own object.

    slot -> storage          dependence is followed by it (plan.py), for views alias
    slot -> gradient         whether the value required one when it was recorded
    written storages         those of constants that the script wrote to: from then on they hold a value

The objects are held, as long as the slots are, so that no other one gets the identity of any.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowgauge.session.tensors.storage import storage_of


class Slots:
    """Those of one tape.

    Attributes:
        keys: each slot's storage.
    """

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self._grads: list[bool] = []
        self._written: set[Any] = set()
        self._of: dict[int, int] = {}  # id of a live object -> slot
        self._held: list[Any] = []

    def __contains__(self, value: Any) -> bool:
        """Whether it is a value of the tape."""
        return id(value) in self._of

    def of(self, value: Any) -> int | None:
        """Its slot, if it has one."""
        return self._of.get(id(value))

    def put(self, value: Any) -> int:
        """Its slot, from now on; what is known of its gradient is what it is now."""
        slot = self._of.get(id(value))
        if slot is None:
            slot = self._of[id(value)] = len(self.keys)
            self.hold(value)
            self.keys.append(_storage(value) if isinstance(value, Tensor) else ("number", id(value)))
            self._grads.append(False)
        self._grads[slot] = isinstance(value, Tensor) and value.requires_grad
        return slot

    def hold(self, value: Any) -> None:
        """Keep an object that is told by its identity."""
        self._held.append(value)

    def mutated(self, tensor: Tensor) -> Any:
        """A call wrote to this value: its storage."""
        slot = self._of[id(tensor)]
        self._grads[slot] = tensor.requires_grad
        return self.keys[slot]

    def write(self, tensor: Tensor) -> None:
        """The script writes to a constant."""
        self._written.add(_storage(tensor))

    def written(self, tensor: Tensor) -> bool:
        """Whether the script wrote to what a constant lies in."""
        return bool(self._written) and _storage(tensor) in self._written

    def concerns(self, tensor: Tensor, grad: bool) -> bool:
        """Whether a value that is computed from `tensor` may be another one in a replay; `grad`: they are on."""
        return tensor in self or (grad and tensor.requires_grad) or self.written(tensor)

    def unfollowed(self, tensor: Tensor, slot: int) -> bool:
        """Whether this value has come to require a gradient by nothing that was recorded."""
        return tensor.requires_grad and not self._grads[slot]


def _storage(tensor: Tensor) -> Any:
    storage = storage_of(tensor)
    return ("tensor", id(tensor)) if storage is None else storage._cdata  # without one: alone with itself
