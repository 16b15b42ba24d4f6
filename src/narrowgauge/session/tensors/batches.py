"""What a program feeds its models: hashed, so that two runs can be told to have seen the same, and counted.

What a model made is no data: a picture goes from generator to discriminator, and differs as soon as weights do. It is
known by its storage, which `detach`, views and reshaping share; a copy of it (`torch.cat`) counts as data. A batch that
wants a gradient itself is counted, if there is no other, and not hashed: it may have moved by gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from narrowgauge.session.tensors.fingerprint import Chained, chain
from narrowgauge.session.tensors.sharded import here


class Batches:
    """Every batch of a program so far; `digest` is None before the first."""

    def __init__(self) -> None:
        self.digest: Chained | None = None
        # A storage's address is not used again while somebody holds a weak reference to it.
        self._made: dict[int, StorageWeakRef] = {}
        self._given: set[int] = set()
        self._last: dict[int, StorageWeakRef] = {}  # what was given last, as far as somebody still has it
        self._unread: set[str] = set()
        self._closed: set[str] = set()

    @property
    def notes(self) -> list[str]:
        """What the digest says nothing about; empty if it covers every input."""
        notes = []
        if self._unread:
            kinds = " and ".join(sorted(self._unread))
            notes.append(
                f"Some inputs are {kinds} tensors, which are not hashed: whether the runs saw the same ones is not "
                "known."
            )
        if self._closed:
            kinds = " and ".join(sorted(self._closed))
            notes.append(f"Some inputs are objects ({kinds}), whose tensors are not found: they count no tokens.")
        return notes

    def see(self, inputs: Any, *, more: bool = False) -> int:
        """A model's call begins with these; returns the tokens in them (samples, if no input is token ids).

        Or they are `more` inputs of a call that was seen already: then they add tokens only if it had none.
        """
        before = self._given if more else set()
        self._made = {address: kept for address, kept in self._made.items() if not kept.expired()}
        found = _tensors(inputs)
        if not found:
            self._closed |= {type(x).__name__ for x in tree_leaves(inputs) if hasattr(x, "__dict__")}
        known = {a: x for x in found if (a := _address(x)) is not None}
        self._last = {a: StorageWeakRef(x.untyped_storage()) for a, x in known.items()}
        self._given = before | known.keys()
        self._unread |= {_kind(x) for x in found if not x.requires_grad and not _dense(x)}
        tensors = [x for x in found if not x.requires_grad and _address(x) not in self._made]
        self.digest = chain([x for x in tensors if _dense(x)], self.digest)
        tensors = [x for x in tensors if _dense(x) or (x.is_nested and not x.is_meta)]
        if any(x.dtype != torch.bool for x in found):  # or else a mask, which tells of no tokens of its own
            tensors = [x for x in tensors if x.dtype != torch.bool]
        if not tensors:
            tensors = [x for x in found if x.requires_grad and x.is_leaf and type(x) is Tensor]
        batched = [x for x in tensors if x.dim()]
        if before:
            return 0
        ids = next((x for x in batched if not x.is_floating_point() and x.dtype != torch.bool), None)
        return ids.numel() if ids is not None else batched[0].size(0) if batched else len(tensors[:1])

    def again(self, inputs: Any) -> bool:
        """Whether any of these was among the inputs of the last call."""
        return any((kept := self._last.get(_address(x) or 0)) and not kept.expired() for x in _tensors(inputs))

    def made(self, output: Any) -> None:
        """A model's call returned this. What it only passed through stays data."""
        for x in _tensors(output):
            if (address := _address(x)) is not None and address not in self._given:
                self._made[address] = StorageWeakRef(x.untyped_storage())


def _tensors(held: Any) -> list[Tensor]:
    """All tensors in there; what is no container of torch's is only looked into where there are no others."""
    leaves = tree_leaves(held)
    found = [here(x) for x in leaves if isinstance(x, Tensor)]
    return found or [here(x) for leaf in leaves for x in tree_leaves(_inside(leaf)) if isinstance(x, Tensor)]


def _inside(x: Any) -> Any:
    if is_dataclass(x) and not isinstance(x, type):
        return [getattr(x, field.name, None) for field in fields(x)]
    return dict(x) if isinstance(x, Mapping) else None


def _dense(x: Tensor) -> bool:
    """Whether a tensor's bits can be read one by one."""
    return x.layout is torch.strided and x.device.type != "meta" and not x.is_nested


def _kind(x: Tensor) -> str:
    """What a tensor is that is not dense."""
    if x.is_nested:
        return "nested"
    return "meta" if x.device.type == "meta" else str(x.layout).removeprefix("torch.")


def _address(x: Tensor) -> int | None:
    """What tells storages apart; None for tensors that have none, such as sparse ones, of which `notes` tell."""
    try:
        return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
