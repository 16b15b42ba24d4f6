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
from narrowgauge.session.tensors.storage import storage_of

_EMPTY = frozenset((type(None), bool, int, float, str))  # of these nothing has to be asked


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
        self._units: set[str] = set()  # what was counted: "tokens", "samples"

    def facts(self) -> dict[str, str]:
        """What `tokens` counts; nothing before there were any."""
        return {"counted": " and ".join(sorted(self._units, reverse=True))} if self._units else {}

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
        if self._made:
            self._made = {address: kept for address, kept in self._made.items() if not kept.expired()}
        found = _tensors(inputs)
        if not found:
            self._closed |= {type(x).__name__ for x in tree_leaves(inputs) if hasattr(x, "__dict__")}
        self._given, self._last = set(before), {}
        data: list[Tensor] = []  # what is neither made by a model nor moved by gradients, and can be counted
        for x in found:
            storage, dense = storage_of(x), _dense(x)
            if storage is not None:
                self._given.add(storage._cdata)
                self._last[storage._cdata] = StorageWeakRef(storage)
            if x.requires_grad:
                continue
            if not dense:
                self._unread.add(_kind(x))
            if storage is not None and storage._cdata in self._made:
                continue
            if dense:
                self.digest = chain((x,), self.digest)
            if dense or (x.is_nested and not x.is_meta):
                data.append(x)
        if before:
            return 0
        count, are_ids = _tokens(found, data)
        if count:
            self._units.add("tokens" if are_ids else "samples")
        return count

    def again(self, inputs: Any) -> bool:
        """Whether any of these was among the inputs of the last call."""
        return any((kept := self._last.get(_address(x) or 0)) and not kept.expired() for x in _tensors(inputs))

    def made(self, output: Any) -> None:
        """A model's call returned this. What it only passed through stays data."""
        for x in _tensors(output):
            if (address := _address(x)) is not None and address not in self._given:
                self._made[address] = StorageWeakRef(x.untyped_storage())


def _tokens(found: list[Tensor], data: list[Tensor]) -> tuple[int, bool]:
    """How many token ids are among the data, or samples, if there are none, and which; `found` is all that was given.

    Ids are the first whole numbers in rows, [B, T]. A single row is all there is (packed texts), or says something of
    what lies in rows beside it: offsets of their parts, their classes or time steps.
    """
    if any(x.dtype != torch.bool for x in found):  # or else a mask, which tells of no tokens of its own
        data = [x for x in data if x.dtype != torch.bool]
    if not data:
        data = [x for x in found if x.requires_grad and x.is_leaf and type(x) is Tensor]
    batched = [x for x in data if x.dim()]
    whole = [x for x in batched if not x.is_floating_point() and x.dtype != torch.bool and not _is_picture(x)]
    ids = next((x for x in whole if x.dim() > 1), None)
    if ids is not None:
        return ids.numel(), True
    rows = [x.size(0) for x in batched if x.dim() > 1]
    if whole and not rows:  # packed ids beside where each text begins
        return max(x.numel() for x in whole), True
    return (rows[0] if rows else batched[0].size(0) if batched else len(data[:1])), False


def _is_picture(x: Tensor) -> bool:
    """Whether it is pixels, not ids: [B, C, H, W] or [C, H, W] in bytes."""
    return x.dtype == torch.uint8 and x.dim() > 2


def _tensors(held: Any) -> list[Tensor]:
    """All tensors in there; what is no container of torch's is only looked into where there are no others."""
    found = _leaves(held, [])
    return found or [here(x) for leaf in tree_leaves(held) for x in _leaves(_inside(leaf), [])]


def _leaves(held: Any, found: list[Tensor]) -> list[Tensor]:
    """`found`, and the tensors in there; torch's own search, in a fifth of the time for what it mostly meets."""
    kind = type(held)
    if kind is tuple or kind is list:
        for x in held:
            _leaves(x, found)
    elif kind is dict:
        for x in held.values():
            _leaves(x, found)
    elif isinstance(held, Tensor):
        found.append(here(held))
    elif kind not in _EMPTY:
        found += [here(x) for x in tree_leaves(held) if isinstance(x, Tensor)]
    return found


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
    storage = storage_of(x)
    return None if storage is None else int(storage._cdata)
