"""What the models of a step were given: a batch that goes to several of them is one batch.

    actor(x); critic(x)             the same rows, for two models
    q(x), k(x), v(x)                for three parts of one that is never called itself
    model(x); model(x)              two looks at them by one model, which both are the step's
    x.copy_(next); actor(x)         others, in the same memory

A batch is known by its memory, what it has of it and how often that was written, so that views and reshaping do not
hide it. What a copy holds (`torch.cat`) is not asked. Nothing here keeps a tensor's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from weakref import ReferenceType

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.session.tensors.counting import Given

# Its memory, held as weakly (it is one object for as long as it is there), what of it, and how often it was written.
Kept = tuple[ReferenceType[UntypedStorage], int, int, int | None]


class GivenBefore:
    """Of the open step."""

    def __init__(self) -> None:
        # By memory and what of it: who was given it first, what was written until then. While the reference is held
        # the memory's address is not used again.
        self._by: dict[tuple[int, int, int], tuple[int, int | None, StorageWeakRef]] = {}
        self._latest: list[tuple[int, int, int]] = []  # what the last call was the first to be given

    def begin_anew(self) -> None:
        """What was given so far is none of the step's."""
        self._by.clear()
        self._latest = []

    def take_back(self) -> None:
        """The last call was left by an error: what it was given counts where it comes next."""
        for key in self._latest:
            self._by.pop(key, None)
        self._latest = []

    def before_the_last(self) -> GivenBefore:
        """As this was before the last call."""
        found = GivenBefore()
        found._by = {key: whose for key, whose in self._by.items() if key not in self._latest}
        return found

    def recall(self, given: Iterable[Kept], model: int) -> None:
        """As if this model had been given all of these, as far as somebody still has them."""
        for known, offset, numel, version in given:
            storage = known()
            if storage is not None:
                self._by[storage._cdata, offset, numel] = model, version, StorageWeakRef(storage)

    def has(self, known: Collection[tuple[int, int, int, int | None]]) -> bool:
        """Whether all of these, by memory, what of it and how often it was written, were given; False of none."""
        return bool(known) and all(
            (before := self._by.get((memory, offset, numel))) is not None and before[1] == version
            for memory, offset, numel, version in known
        )

    def to_another(self, data: Sequence[Given], held: Mapping[int, StorageWeakRef], model: int) -> bool:
        """Whether the first of these was given to another model before; all of them are this one's now, if not.

        Their memory is `held` weakly, or is none.
        """
        known, self._latest = False, []
        for at, given in enumerate(data):
            if not given.memory:
                continue
            key = given.memory, int(given.x.storage_offset()), given.x.numel()
            before, version = self._by.get(key), version_of(given.x)
            if before is not None and before[0] != model and before[1] == version:
                known |= at == 0
            else:
                self._by[key] = model, version, held[given.memory]
                self._latest.append(key)
        return known


def version_of(x: Tensor) -> int | None:
    """How often it was written; None where torch does not count that."""
    return None if x.is_inference() else x._version
