"""What is trained: the optimizers of a program, and the parameters of each, now and as it was made with.

    opt = AdamW(model.parameters())         made with the model's own parameters: by them the model is found
    opt.param_groups[0]["params"] = [flat]  ZeRO and Megatron's distributed optimizer lay them flat, cut them over the
                                            ranks, and put this rank's part in their place: a norm over it is a part
    [flat] with as many elements            laid flat and not cut: all of it
    opt = AdamW(masters)                    made with copies in float32 (tensors/masters.py): the model that they are of
                                            counts as trained, once it was told by its values
    opt = AdamW(meta.parameters())          on the meta device nothing has numbers: what steps there is an estimate, of
                                            memory say, and no training

Optimizers and parameters are held weakly, and told apart as objects: an optimizer need not be hashable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from weakref import ReferenceType, WeakSet, ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from narrowgauge.session.tensors.masters import copies_of
from narrowgauge.session.tensors.of_modules import ids_in_tables, ids_of
from narrowgauge.session.tensors.sharded import is_distributed, lowest, mesh_size, shape_of
from narrowgauge.session.tensors.shares import group_of
from narrowgauge.session.tensors.weakly import Weak, weakly


class Trained:
    """The optimizers that the program made and still holds."""

    def __init__(self) -> None:
        self._known: dict[int, ReferenceType[Optimizer]] = {}  # by id, as what follows
        self._made: dict[int, dict[int, Weak]] = {}
        self._elements: dict[int, int] = {}  # of what it was made with
        self._copied: dict[int, Weak] = {}  # parameters of models whose copies are trained
        self._asked: WeakSet[nn.Module] = WeakSet()  # modules that are no such models
        self._all: dict[int, Weak] | None = None  # what `made` told, until something else was made or is gone

    def __contains__(self, optimizer: Optimizer) -> bool:
        known = self._known.get(id(optimizer))
        return known is not None and known() is optimizer

    def __iter__(self) -> Iterator[Optimizer]:
        living = [known() for known in list(self._known.values())]
        return (optimizer for optimizer in living if optimizer is not None)

    def __bool__(self) -> bool:
        for known in list(self._known.values()):  # noqa: SIM110 - asked at every call: a generator takes longer
            if known() is not None:
                return True
        return False

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, optimizer: Optimizer, made_with: Sequence[Tensor] | None = None) -> None:
        """An optimizer was made, `made_with` these parameters if it does not have them any more."""
        made = parameters(optimizer) if made_with is None else made_with
        number = id(optimizer)

        def gone(known: ReferenceType[Optimizer]) -> None:
            if self._known.get(number) is known:
                del self._known[number], self._made[number], self._elements[number]
                self._all = None

        self._made[number] = {id(p): weakly(p) for p in made}
        self._elements[number] = sum(math.prod(shape_of(p)) for p in made)
        self._known[number] = ref(optimizer, gone)
        self.changed()

    def changed(self) -> None:
        """Optimizers hold other parameters than before: any module may have copies among them."""
        self._asked.clear()
        self._all = None

    def parameters(self) -> list[Tensor]:
        """All that optimizers hold now, and that have numbers."""
        found = []
        for known in list(self._known.values()):  # in one function: asked in steps that are left alone, too
            for group in () if (optimizer := known()) is None else optimizer.param_groups:
                found += [p for p in group["params"] if not p.is_meta]
        return found

    def ids(self) -> set[int]:
        """The ids of all parameters that optimizers hold, or held when they were made, and that have numbers."""
        found = {id(p) for p in self.parameters()}
        known = [self._copied, *self._made.values()]
        before = ((at, p()) for made in known for at, p in made.items())
        return found | {at for at, p in before if p is not None and not p.is_meta}

    def made(self) -> dict[int, Weak]:
        """By their ids, what living optimizers were made with, or copies of it: most of `ids`, and told at once."""
        if self._all is None:
            found = self._all = {}  # there from the beginning: while it is filled, an optimizer may go
            for known in (self._copied, *list(self._made.values())):
                found.update((at, p) for at, p in known.items() if p() is not None)
            return found
        return self._all

    def holds(self, these: Set[int]) -> bool:
        """Whether any of these is one of `ids`, which are asked as they are, and not gathered."""
        for p in self._met(these):  # noqa: SIM110 - asked at each backward beside others: a generator takes longer
            if not p.is_meta:
                return True
        return False

    def _met(self, these: Set[int]) -> Iterator[Tensor]:
        for made in (self._copied, *list(self._made.values())):
            if not made.keys().isdisjoint(these):
                for at in made.keys() & these:
                    if (p := made[at]()) is not None:
                        yield p
        for known in list(self._known.values()):
            for group in () if (optimizer := known()) is None else optimizer.param_groups:
                now = group["params"]
                if not these.isdisjoint(map(id, now)):
                    yield from (p for p in now if id(p) in these)

    def passes_by(self, module: nn.Module) -> bool:
        """Whether it is sure at once that the module does not own anything: it was asked, and has nothing since.

        The program's modes see none of this; where they might, or it is not sure, `owns` is to be asked.
        """
        own = ids_in_tables(module)
        if own is None or (own and module not in self._asked):
            return False
        for made in (self._copied, *list(self._made.values())):
            if not made.keys().isdisjoint(own):
                return next(self._met(own), None) is None
        for known in list(self._known.values()):  # as that asks, in no function more
            for group in () if (optimizer := known()) is None else optimizer.param_groups:
                if not own.isdisjoint(map(id, group["params"])):
                    return False
        return True

    def owns(self, module: nn.Module) -> bool:
        """Whether any of the module's parameters is trained, itself or by a copy; the copies are looked for once."""
        own = ids_of(module)
        if not own:
            return False
        if self.holds(own):
            return True
        if module in self._asked:
            return False
        self._asked.add(module)
        copied = copies_of(module, (p for optimizer in self for p in parameters(optimizer)))
        self._copied.update((id(p), weakly(p)) for p in copied)
        self._all = None
        return bool(copied)

    def mesh(self) -> int | None:
        """The lowest rank of the largest mesh that anything of it lies on; None if nothing lies on one."""
        every = [p for optimizer in self for p in parameters(optimizer)]
        largest = max(filter(is_distributed, every), key=mesh_size, default=None)
        if largest is not None:
            return lowest(largest.device_mesh)  # type: ignore[attr-defined]
        groups = sorted(map(group_of, every), key=len)
        return min(groups[-1], default=None) if groups else None

    def in_parts(self, optimizer: Optimizer) -> bool:
        """Whether what it holds now seems to be this rank's part of what it was made with, laid flat."""
        made = self._made.get(id(optimizer))
        if not made or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return False
        now = parameters(optimizer)
        if not now or not all(p.dim() == 1 and id(p) not in made for p in now):
            return False
        return sum(p.numel() for p in now) < self._elements[id(optimizer)]


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Those that it holds now."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def only_estimates(optimizer: Optimizer) -> bool:
    """Whether all that it holds is on the meta device."""
    for group in optimizer.param_groups:  # the first parameter tells, of nearly every one
        for p in group["params"]:
            if not p.is_meta:
                return False
    return any(group["params"] for group in optimizer.param_groups)
